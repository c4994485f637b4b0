"""Which library an array belongs to, and the module that serves it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Dict

from ._checks import check_unmasked, no_array
from ._core import InputTypeError

_KNOWN: Dict[type, Any] = {}


def face_of(array: Any, name: str = "q") -> Any:
    """The module that serves arrays of this type: `fa_attn.torch`, or one of `fa_attn._arrays`. `name` is for
    the error about what is none."""
    kind = type(array)
    face = _KNOWN.get(kind)
    return face if face is not None else _find(kind, name)


def of_one_library(name, value, q, face):
    """Checks that an array that is written is of the library that q is of; results of arrays that are lent
    to numpy are numpy's."""
    if face_of(value, name) is not face and not (face.lends and isinstance(value, face.library.np.ndarray)):
        kinds = [f"{type(x).__module__.split('.')[0]}.{type(x).__name__}" for x in (value, q)]
        raise InputTypeError(f"{name} is {kinds[0]} and q {kinds[1]}: give both of one library")


def _find(kind, name):
    # torch's, at the first call even while torch.compile traces it: it reads no names of modules.
    if hasattr(kind, "__torch_function__"):
        from . import torch as face

        _KNOWN[kind] = face
        return face
    roots = {base.__module__.split(".")[0] for base in kind.__mro__}
    if "cupy" in roots:
        library = "cupy"
    elif roots & {"jax", "jaxlib"}:
        library = "jax"
    elif "numpy" in roots:
        check_unmasked(kind)
        library = "numpy"
    elif hasattr(kind, "__dlpack__"):
        library = "lent"
    else:
        raise no_array(name, kind.__name__)
    face = _own(library)
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
