"""Which library an array belongs to, and the module that serves it."""

from __future__ import annotations

from typing import Any, Dict

from ._core import InputTypeError

_KNOWN: Dict[type, Any] = {}


def face_of(array: Any) -> Any:
    """The module that serves arrays of this type: `fa_attn.torch`, or one of `fa_attn._arrays`."""
    kind = type(array)
    face = _KNOWN.get(kind)
    return face if face is not None else _find(kind)


def of_one_library(name, value, q, face):
    """Checks that an array that is written is of the library that q is of; results of arrays that are lent
    to numpy are numpy's."""
    if face_of(value) is not face and not (face.lends and isinstance(value, face.library.np.ndarray)):
        kinds = [f"{type(x).__module__.split('.')[0]}.{type(x).__name__}" for x in (value, q)]
        raise InputTypeError(f"{name} is {kinds[0]} and q {kinds[1]}: give both of one library")


def _find(kind):
    # torch's, at the first call even while torch.compile traces it: it reads no names of modules.
    if hasattr(kind, "__torch_function__"):
        from . import torch as face

        _KNOWN[kind] = face
        return face
    roots = {base.__module__.split(".")[0] for base in kind.__mro__}
    if "cupy" in roots:
        from ._arrays import cupy_face as make

        face = make()
    elif roots & {"jax", "jaxlib"}:
        from ._arrays import jax_face as make

        face = make()
    elif "numpy" in roots:
        from ._arrays import numpy_face as make

        face = make()
    elif hasattr(kind, "__dlpack__"):
        from ._arrays import lent_face as make

        face = make()
    else:
        raise InputTypeError(
            f"{kind.__module__}.{kind.__qualname__} is no array that speaks DLPack: use numpy, torch, jax or "
            "cupy"
        )
    _KNOWN[kind] = face
    return face
