"""jax's attention of float64 by jax's operations: all scores in memory, derivatives of every order."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import jax
import jax.numpy as jnp

from ._core import InputError

# The sides of a window, None without one.
Sides = Optional[Tuple[int, int]]


def attention(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    mask: Any,
    scale: Any,
    is_causal: bool,
    window: Sides,
    lengths_q: Any,
    lengths_k: Any,
    wants_lse: bool,
) -> Tuple[Any, Any]:
    """(out, LSE) of arrays (batch, rows, heads, columns), aligned at the top left. Without `wants_lse` LSE is
    None, and no number is infinite, which programs may forbid by jax_debug_infs."""
    batch, rows, heads, columns = q.shape
    keys, heads_kv = k.shape[1:3]
    if heads % max(heads_kv, 1) or v.shape[:3] != k.shape[:3] or k.shape[-1] != columns:
        raise InputError(
            f"query, key and value have the shapes {q.shape}, {k.shape} and {v.shape}: the number of query "
            "heads must be a multiple of key/value heads, and all other axes but value's last as in key"
        )
    q = q.reshape(batch, rows, heads_kv, heads // heads_kv, columns)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, precision="highest")
    scores = scores.reshape(batch, heads, rows, keys) * (columns**-0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + _of_four_axes(bias)
    row, key = jnp.arange(rows)[None, None, :, None], jnp.arange(keys)[None, None, None, :]
    seen = jnp.ones((1, 1, rows, keys), bool) if mask is None else _of_four_axes(mask)
    if is_causal:
        seen = seen & (key <= row)
    if window is not None:
        seen = seen & (key >= row - window[0]) & (key <= row + window[1])
    for lengths, place in ((lengths_q, row), (lengths_k, key)):
        if lengths is not None:
            seen = seen & (place < jnp.asarray(lengths).reshape(-1, 1, 1, 1))
    seen = jnp.broadcast_to(seen, scores.shape)
    is_blind = ~seen.any(-1, keepdims=True)
    least = float(jnp.finfo(scores.dtype).min)
    top = jax.lax.stop_gradient(jnp.where(seen, scores, least).max(-1, keepdims=True, initial=least))
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - top, 0.0)), 0.0)
    total = jnp.where(is_blind, 1.0, weights.sum(-1, keepdims=True))
    lse = jnp.where(is_blind, -jnp.inf, jnp.log(total) + top)[..., 0] if wants_lse else None
    weights = (weights / total).reshape(batch, heads_kv, heads // heads_kv, rows, keys)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v, precision="highest")
    return out.reshape(batch, rows, heads, v.shape[-1]), lse


def _of_four_axes(array: Any) -> Any:
    """An array that is broadcast to (batch, heads, rows, keys)."""
    return array.reshape((1,) * (4 - array.ndim) + array.shape)
