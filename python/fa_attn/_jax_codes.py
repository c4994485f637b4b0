"""The quantisers of K and V in jax's operations: those of fa-core, on any device and under jit."""

from __future__ import annotations

import jax.numpy as jnp

from ._codes import _LARGEST_FLOAT, _SMALLEST_NORMAL, broadcast_shape
from ._core import InputError
from ._numpy_codes import SIGNS
from ._turned_rows import factor_of, hadamard

# A type that holds the value of every code, and that kernels append rows of.
WIDE = jnp.float16
# What queries in codes of e5m2 become, and the result with them.
NUMBERS = jnp.bfloat16
# Codes that are numbers of jax's.
_FLOATS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def quantized(x, codes, largest, axes, descale):
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize == 1:
        raise InputError(f"x holds {x.dtype}: it must be floating point, of 16 bits or more")
    values = jnp.asarray(x, jnp.float32)
    if descale is None:
        magnitudes = jnp.where(jnp.isfinite(values), jnp.abs(values), 0.0)
        top = magnitudes.max(axes, initial=0.0)
        # Of a division by one number XLA makes a product with its inverse, whose bits are others.
        largest_codes = jnp.where(top < 0.0, 1.0, largest)
        descale = jnp.atleast_1d(jnp.maximum(top / largest_codes, _SMALLEST_NORMAL))
    factor = _beside(descale, values)
    inverse = jnp.clip(1.0 / factor, -_LARGEST_FLOAT, _LARGEST_FLOAT)
    values = jnp.clip(values * jnp.where(factor == 0, 0.0, inverse), -largest, largest)
    if codes in _FLOATS:
        return values.astype(_FLOATS[codes]), descale
    values = jnp.round(jnp.where(jnp.isnan(values), 0.0, values)).astype(jnp.int8)
    if codes == "int4":
        values = (values[..., ::2] & 15 | values[..., 1::2] << 4).view(jnp.uint8)
    return values, descale


def _beside(descale, x):
    """Descales with as many axes as what they are multiplied with: jax may be told to promote no ranks."""
    shape = broadcast_shape(descale, x)
    return jnp.asarray(descale, jnp.float32).reshape((1,) * (x.ndim - len(shape)) + tuple(shape))


def decoded(codes, descale, dtype, kind):
    codes = jnp.asarray(codes)
    if kind == "int4":
        upper = codes.view(jnp.int8)
        codes = jnp.stack((upper << 4, upper), -1).reshape(*codes.shape[:-1], -1) >> 4
    elif codes.dtype == jnp.uint8:
        codes = codes.view(_FLOATS[kind])
    values = codes.astype(jnp.float32)
    if descale is not None:
        values = values * _beside(descale, codes)
    return values if dtype is None else values.astype(dtype)


def scaled(x, descale, starts, group):
    """Queries, or a result, times a descale (heads_kv,) or (batch, heads_kv). `starts`: those of packed
    sequences, or None; `group`: query heads of a K/V head."""
    factor = jnp.repeat(jnp.asarray(descale, jnp.float32), group, -1)
    if factor.ndim == 2 and starts is None:
        factor = factor[:, None]
    elif factor.ndim == 2 and factor.shape[0] > 0:
        of_row = jnp.searchsorted(jnp.asarray(starts)[1:], jnp.arange(x.shape[0]), side="right")
        factor = factor[jnp.minimum(of_row, factor.shape[0] - 1)]
    factor = factor.reshape((1,) * (x.ndim - 1 - factor.ndim) + factor.shape)
    return (x * factor[..., None]).astype(x.dtype)


def encoded(x):
    return quantized(x, "e4m3", 448.0, None, jnp.ones(1))[0]


def without_zero_points(codes, scales):
    """int8 and descales of rows of vLLM's int4_per_token_head, beside queries that `turned` turns."""
    codes, bits = jnp.asarray(codes), jnp.asarray(scales).view(jnp.int32)
    numbers = jnp.stack((codes & 15, codes >> 4), -1).reshape(*codes.shape[:-1], -1).astype(jnp.int8)
    descales = (bits & -16).view(jnp.float32) * factor_of(2 * codes.shape[-1])
    return numbers - (bits & 15).astype(jnp.int8)[..., None], descales


def turned(x, back):
    """Rows as vLLM turns them for int4_per_token_head, with their length; `back`: turned back."""
    values = jnp.asarray(x, jnp.float32)
    signs = jnp.asarray(SIGNS[: x.shape[-1]]).reshape((1,) * (x.ndim - 1) + (-1,))
    values = hadamard(values, jnp.stack) * signs if back else hadamard(values * signs, jnp.stack)
    return values.astype(x.dtype)
