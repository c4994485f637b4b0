"""The quantisers of K and V for numpy's arrays, and for others that numpy reads: those of fa-core."""

from __future__ import annotations

import numpy as np

from . import _core
from ._codes import _LARGEST_FLOAT, _SMALLEST_NORMAL, broadcast_shape
from ._core import InputError
from ._turned_rows import NEGATED, factor_of, hadamard

# A type that holds the value of every code, and that kernels append rows of.
WIDE = np.float32
# What queries in codes of e5m2 become, and the result with them.
NUMBERS = np.float32


def _floats(name, x):
    x = np.asarray(x)
    if not (np.issubdtype(x.dtype, np.floating) or x.dtype.name == "bfloat16"):
        raise InputError(f"{name} holds {x.dtype}: it must be floating point")
    return x.astype(np.float32)


def quantized(x, codes, largest, axes, descale):
    values = _floats("x", x)
    if descale is None:
        magnitudes = np.where(np.isfinite(values), np.abs(values), np.float32(0))
        top = magnitudes.max(axes, initial=np.float32(0))
        descale = np.atleast_1d(np.maximum(top / np.float32(largest), np.float32(_SMALLEST_NORMAL)))
    factor = _floats("descale", descale).reshape(broadcast_shape(descale, values))
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.clip(np.float32(1) / factor, -_LARGEST_FLOAT, _LARGEST_FLOAT, dtype=np.float32)
        scaled = np.ascontiguousarray(values * np.where(factor == 0, np.float32(0), inverse))
    *rows, columns = values.shape
    columns = columns // 2 if codes == "int4" else columns
    made = np.empty((*rows, columns), np.int8 if codes == "int8" else np.uint8)
    _core.encode(scaled, made, codes)
    return made, descale


# The number of every e4m3 code.
_BITS = np.arange(256)
_MAGNITUDES = np.where(
    _BITS & 0x78,
    (1 + (_BITS & 7) / 8) * 2.0 ** ((_BITS >> 3 & 15) - 7.0),
    (_BITS & 7) / 512,
)
E4M3 = np.where(_BITS & 0x7F == 0x7F, np.nan, np.where(_BITS < 128, 1, -1) * _MAGNITUDES).astype(np.float32)


def decoded(codes, descale, dtype, kind):
    codes = np.asarray(codes)
    if kind == "int4":
        upper = codes.view(np.int8)
        codes = np.stack((upper << 4, upper), -1).reshape(*codes.shape[:-1], -1) >> 4
    if kind == "e4m3":
        values = E4M3[codes.view(np.uint8)]
    elif kind == "e5m2":
        # The upper byte of float16.
        values = (codes.view(np.uint8).astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    else:
        values = codes.astype(np.float32)
    if descale is not None:
        values = values * _floats("descale", descale).reshape(broadcast_shape(descale, codes))
    return values if dtype is None else values.astype(dtype)


def are_descales(x):
    """Whether all values are finite and not negative, as the extension module has it."""
    x = _floats("descale", x)
    return bool(((x >= 0) & (x < np.inf)).all())


def scaled(x, descale, starts, group):
    """Queries, or a result, times a descale (heads_kv,) or (batch, heads_kv). `starts`: those of packed
    sequences, or None; `group`: query heads of a K/V head."""
    factor = np.repeat(_floats("descale", descale), group, -1)
    if factor.ndim == 2 and starts is None:
        factor = factor[:, None]
    elif factor.ndim == 2 and factor.shape[0] > 0:
        of_row = np.searchsorted(np.asarray(starts)[1:], np.arange(x.shape[0]), side="right")
        factor = factor[np.minimum(of_row, factor.shape[0] - 1)]
    return (x * factor[..., None]).astype(x.dtype)


def encoded(x):
    return quantized(x, "e4m3", 448.0, None, np.ones(1, np.float32))[0]


def without_zero_points(codes, scales):
    """int8 and descales of rows of vLLM's int4_per_token_head, beside queries that `turned` turns."""
    codes, bits = np.asarray(codes), np.ascontiguousarray(scales).view(np.int32)
    numbers = np.stack((codes & 15, codes >> 4), -1).reshape(*codes.shape[:-1], -1).astype(np.int8)
    descales = (bits & -16).view(np.float32) * factor_of(2 * codes.shape[-1])
    return numbers - (bits & 15).astype(np.int8)[..., None], descales


_NEGATED = np.array(NEGATED, np.uint32)[:, None] >> np.arange(32, dtype=np.uint32) & 1
# -1 for negated columns, else 1.
SIGNS = 1 - 2 * _NEGATED.reshape(-1).astype(np.float32)


def turned(x, back):
    """Rows as vLLM turns them for int4_per_token_head, with their length; `back`: turned back."""
    values, signs = _floats("x", x), SIGNS[: x.shape[-1]]
    values = hadamard(values, np.stack) * signs if back else hadamard(values * signs, np.stack)
    return values.astype(x.dtype)
