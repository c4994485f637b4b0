"""Types of the public functions' arguments."""

from __future__ import annotations

from typing import Any, Optional, Protocol, Tuple, TypeVar


class Array(Protocol):
    """An array of numpy, torch, jax, cupy or any other library that supports DLPack."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...

    def __dlpack__(self, *arguments: Any, **options: Any) -> Any: ...


# The array type of one call's inputs and results.
A = TypeVar("A", bound=Array)

# Keys to the left and to the right of the diagonal; -1 or None for no limit.
Window = Tuple[Optional[int], Optional[int]]
