"""Checks of options before anything is computed: each error names the argument, its value and what would
work."""

import sys
from numbers import Integral
from operator import index
from reprlib import repr as short

from ._core import InputError, InputTypeError, UnsupportedError

# Lengths are int32.
LARGEST = (1 << 31) - 1

# More than any sequence has.
_FAR = 1 << 40

_EVERYWHERE = (-1, -1)


def window(window_size):
    """(left, right), -1 where there is no limit."""
    try:
        if window_size is None or (type(window_size) is tuple and window_size == _EVERYWHERE):
            return _EVERYWHERE
        left, right = (-1 if side is None else max(-1, min(index(side), _FAR)) for side in window_size)
    except (TypeError, ValueError):
        raise InputError(
            f"window_size is {short(window_size)}: it must be (left, right), keys on each side, -1 for no "
            "limit"
        ) from None
    return left, right


def number(name, value):
    """A float; None where the value is None."""
    if value is None or type(value) is float:
        return value
    if getattr(value, "requires_grad", False):
        _no_gradient(name)
    try:
        # True is what a third generation's caller gives by position for `causal`.
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputTypeError(f"{name} is {short(value)}: it must be a number") from None


def _no_gradient(name):
    """Raises where a torch tensor that is used as a number would lose its gradient."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{name} requires a gradient, which is not computed: detach it (a factor on q has one)"
        )


def flag(name, value):
    """A bool, from a bool or from 0 or 1."""
    if value is True or value is False:
        return value
    one = getattr(value, "shape", ()) == () and not isinstance(value, str)
    if value is None or (one and value in (0, 1)):
        return bool(value)
    raise InputTypeError(f"{name} is {short(value)}: it must be True or False")


def most(name, value):
    """An upper bound on rows."""
    try:
        rows = int(value) if isinstance(value, float) and value.is_integer() else index(value)
    except TypeError:
        raise InputError(f"{name} is {short(value)}: it must be a whole number") from None
    if rows < 0:
        raise InputError(f"{name} is {rows}: it must be at least 0")
    return min(rows, _FAR)


def count(name, value, least=0, most=_FAR):
    """A whole number of a problem, from `least` to `most`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = index(value)
    except TypeError:
        raise InputTypeError(f"{name} is {short(value)}: it must be a whole number") from None
    if not least <= number <= most:
        raise InputError(f"{name} is {number}: it must be from {least} to {most}")
    return number


def one_of(name, value, choices):
    """The value, checked to be one of these names."""
    if not isinstance(value, str) or value not in choices:
        need = ", ".join(map(repr, choices))
        raise InputError(f"{name} is {short(value)}: it must be one of {need}")
    return value


def array(name, value):
    """The value, checked to have a shape."""
    if not hasattr(value, "shape"):
        kind = type(value).__name__
        raise InputTypeError(
            f"{name} is {kind}: it must be an array that speaks DLPack (numpy, torch, jax, cupy)"
        )
    return value


def int32(name, value):
    """The value, checked to be an array of int32."""
    if str(value.dtype).rpartition(".")[2] != "int32":
        raise InputError(f"{name} holds {value.dtype}: it must be int32, convert it once")
    return value


def masses(name, lse, out):
    """The LSE, checked against the shape of `out` or q: (batch, heads, seqlen), or (heads, total)."""
    *outer, rows, heads, _ = tuple(array("out", out).shape)[-4:] if len(out.shape) > 2 else (0, 0, 0)
    need, have = (*outer, heads, rows), tuple(array(name, lse).shape)
    if have != need:
        raise InputError(
            f"{name} has the shape {have}: its elements must be {need}, (batch, heads, seqlen) or packed"
        )
    return lse


def room(out, shape, dtype):
    """Checks the shape and type of an array that the caller gives for a result."""
    have, need = tuple(array("out", out).shape), tuple(shape)
    if have != need:
        raise InputError(f"out has the shape {have}: it must be {need}, that of the result")
    if out.dtype != dtype:
        raise InputError(f"out holds {out.dtype}: it must hold {dtype}, as q does")
    return out


def apart(out, inputs, overlap):
    """Checks that no input, by name, shares memory with the output."""
    for name, value in inputs.items():
        if overlap(out, value):
            raise InputError(f"out lies in the memory of {name}, which is still read: give room of its own")


def paddings(leftpad, room):
    """Checks `cache_leftpad` in host memory: each entry is within the cache's room."""
    outside = (leftpad < 0) | (leftpad > room)
    if outside.any():
        entry = int(outside.nonzero()[0][0])
        raise InputError(
            f"cache_leftpad[{entry}] is {int(leftpad[entry])}: it must be from 0 to {room}, the cache's room"
        )


def cache_rows(index, rows, table):
    """Checks `cache_batch_idx` in host memory: each entry is one of the cache's `rows`, or a row of the
    table."""
    rows, of = (rows, "the cache") if table is None else (len(table), "the page table")
    outside = (index < 0) | (index >= rows)
    if outside.any():
        entry = int(outside.nonzero()[0][0])
        raise InputError(
            f"cache_batch_idx[{entry}] is {int(index[entry])}: {of} has {rows} rows, so it must be from 0 to "
            f"{rows - 1}"
        )


def is_neutral(value, neutral):
    """Whether an argument has one of its neutral values; an array never has."""
    return any(
        value is n or (isinstance(value, Integral) and n is not None and value == n) for n in neutral
    )


def no_dropout(dropout_p):
    if type(dropout_p) is float and dropout_p == 0.0:
        return
    if dropout_p is not None and number("dropout_p", dropout_p) != 0.0:
        raise UnsupportedError(
            f"dropout_p = {dropout_p}: attention is computed without dropout, set it to 0.0"
        )
