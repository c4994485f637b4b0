"""Which library an array belongs to, and the module that serves it."""

from __future__ import annotations

from functools import lru_cache
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
        name = "cupy"
    elif roots & {"jax", "jaxlib"}:
        name = "jax"
    elif "numpy" in roots:
        name = "numpy"
    elif hasattr(kind, "__dlpack__"):
        name = "lent"
    else:
        raise InputTypeError(
            f"{kind.__module__}.{kind.__qualname__} is no array that speaks DLPack: use numpy, torch, jax or "
            "cupy"
        )
    face = _own(name)
    _KNOWN[kind] = face
    return face


@lru_cache(maxsize=None)
def _own(name):
    """The one face of a library without autograd, whose types share it."""
    from . import _libraries as libraries
    from ._arrays import Arrays, LentArrays

    if name == "jax":
        from ._jax_arrays import JaxArrays

        return JaxArrays(libraries.Jax())
    if name == "cupy":
        return Arrays(libraries.Cupy())
    return (LentArrays if name == "lent" else Arrays)(libraries.Numpy())
