"""Torch's scaled_dot_product_attention: its masks and alignments, nested tensors, any number of axes."""

from __future__ import annotations

from typing import Optional

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant

from . import _torch_composed as composed
from ._checks import flag, number
from ._core import InputError, InputTypeError, UnsupportedError
from ._dropout import dropping, numbers_of
from ._modifications import Extents, broadcast, modifications
from ._torch_by_heads import attention_by_heads, rows_of_heads
from .interface import flash_attn_varlen_func


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Optional[torch.Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Torch's scaled_dot_product_attention: query (.., Hq, L, E), key (.., H, S, E), value (.., H, S, Ev).

    `attn_mask`: broadcast to (.., Hq, L, S); True where a query sees a key, or added to the scaled scores,
    with a gradient where it asks for one; or a causal mask of torch.nn.attention.bias. `dropout_p`:
    probabilities are dropped by torch's generator, with FlashAttention-2's bits. `is_causal` is aligned at
    the top left, and hides keys beside those that `attn_mask` hides. Nested tensors (batch, heads, rows of
    each sequence, head_dim) of the jagged layout are computed as packed rows, without attn_mask.
    A query that sees no key gives 0. float64 is computed by torch's operations, with all scores in memory and
    derivatives of every order; what `dropout_p` drops is then torch's.
    """
    is_causal = flag("is_causal", is_causal)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor) or x.dim() < 2:
            raise InputError(f"{name} must be a torch tensor (.., seqlen, head_dim)")
    if any(x.is_nested for x in (query, key, value)):
        return _of_jagged(
            query, key, value, attn_mask, dropout_p, is_causal, scale, flag("enable_gqa", enable_gqa)
        )
    alignment = _TOP_LEFT if is_causal else None
    if isinstance(attn_mask, CausalBias):
        if is_causal:
            raise InputError("is_causal beside a CausalBias as attn_mask: give one of them")
        alignment, attn_mask = _alignment_of(attn_mask, (query.shape[-2], key.shape[-2])), None
    options = dropout_p, alignment, scale, flag("enable_gqa", enable_gqa)
    return _scaled(query, key, value, attn_mask, *options)


def _of_jagged(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """The same of nested tensors, whose values are packed rows."""
    if attn_mask is not None:
        raise UnsupportedError("attn_mask beside nested tensors: give is_causal, or pad the sequences")
    for name, x in (("query", query), ("key", key), ("value", value)):
        # Their parts are known by private names alone.
        is_jagged = isinstance(x, torch.Tensor) and x.is_nested and x.layout is torch.jagged
        if not is_jagged or x.dim() != 4 or x._ragged_idx != 2 or x.lengths() is not None:
            raise UnsupportedError(
                f"{name} beside nested tensors: all three are nested tensors of layout=torch.jagged, (batch, "
                "heads, rows, head_dim), that are contiguous but for the order of heads and rows"
            )
    if key.shape[2] != value.shape[2]:
        raise InputError("value has other lengths than key: give both the same offsets")
    if is_causal and query.shape[2] != key.shape[2]:
        raise UnsupportedError(
            "is_causal of nested tensors whose query and key have offsets of their own: they are aligned at "
            "the top left where both have the same, or give their values() to flash_attn_varlen_func, which "
            "aligns at the bottom right"
        )
    heads, heads_kv = query.shape[1], key.shape[1]
    if heads != heads_kv and not enable_gqa:
        raise InputError(
            f"query has {heads} heads and key {heads_kv}: set enable_gqa, or repeat the keys' heads"
        )
    out = flash_attn_varlen_func(
        *(x.transpose(1, 2).values() for x in (query, key, value)),
        *(x.offsets().int() for x in (query, key)),
        *map(_longest, (query, key)),
        dropout_p=dropout_p,
        softmax_scale=scale,
        causal=is_causal,
    )
    return torch.nested.nested_tensor_from_jagged(out, query.offsets()).transpose(1, 2)


def _longest(x):
    """The rows of a jagged tensor's longest sequence; in a graph, which reads none on the host, all rows
    where the tensor does not tell."""
    if not torch.compiler.is_compiling():
        return x._get_max_seqlen()
    known = x._maybe_max_seqlen
    return x.values().shape[x._ragged_idx - 1] if known is None else known


# Where a causal mask begins, or ends.
_TOP_LEFT, _BOTTOM_RIGHT = "top left", "bottom right"


def _alignment_of(bias, lengths):
    """That of a mask of torch.nn.attention.bias, which is a tensor without values."""
    if (bias.seq_len_q, bias.seq_len_kv) != lengths:
        raise InputError(
            f"attn_mask is a CausalBias of {(bias.seq_len_q, bias.seq_len_kv)} queries and keys, and the "
            f"call has {lengths}: make one for these"
        )
    return _TOP_LEFT if bias.variant == CausalVariant.UPPER_LEFT else _BOTTOM_RIGHT


def _scaled(query, key, value, attn_mask, dropout_p, alignment, scale, enable_gqa):
    """scaled_dot_product_attention with a causal mask that is aligned in either way, or none."""
    if not query.dim() == key.dim() == value.dim() == 4:
        return _with_other_axes(query, key, value, attn_mask, dropout_p, alignment, scale, enable_gqa)
    query, key, value = _broadcast(query, key, value, enable_gqa)
    # One head of keys is shared by all heads of queries.
    q, k, v = rows_of_heads(query, key, value, enable_gqa or key.shape[1] == 1)
    if alignment is _TOP_LEFT and q.shape[1] < k.shape[1] == v.shape[1]:
        # Keys that no query sees are left out: no kernel has a mask whose diagonal ends so far to the left.
        if isinstance(attn_mask, torch.Tensor) and attn_mask.shape[-1:] == (k.shape[1],):
            attn_mask = attn_mask[..., : q.shape[1]]
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
    extents = Extents(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if composed.is_composed(query, key, value):
        return _composed(q, k, v, attn_mask, dropout_p, alignment, scale, extents)
    mods = None if attn_mask is None else modifications(q, extents, mask=attn_mask)
    mods = dropping(mods, q, lambda: extents, dropout_p, None)
    # At the top left query i sees the keys up to its own.
    offset = q.shape[1] - k.shape[1] if alignment is _TOP_LEFT else 0
    return attention_by_heads(q, k, v, mods, scale, alignment is not None, offset, wants_lse=False)[0]


def _composed(q, k, v, attn_mask, dropout_p, alignment, scale, extents):
    """The same by torch's operations."""
    if attn_mask is not None:
        attn_mask = broadcast("attn_mask", attn_mask, extents)
        if attn_mask.dtype not in (torch.bool, torch.float32, q.dtype):
            raise InputTypeError(
                f"attn_mask holds {attn_mask.dtype}: it must be bool, float32 or {q.dtype}, as query"
            )
    p = number("dropout_p", dropout_p) or 0.0
    if p:
        numbers_of(p)
    offset = {None: None, _TOP_LEFT: 0, _BOTTOM_RIGHT: extents.keys - extents.rows}[alignment]
    change, visible = composed.masked(attn_mask, offset, extents.rows, extents.keys, q.device)
    tensors = (x.transpose(1, 2) for x in (q, k, v))
    return composed.attention(*tensors, number("scale", scale), change, visible, p)[0]


def _broadcast(query, key, value, enable_gqa):
    """Tensors of four axes with the batch and the heads of all three, as torch's own products broadcast them;
    a single head of both key and value stays one, and with `enable_gqa` all heads stay as they are."""
    shapes = [x.shape for x in (query, key, value)]
    if shapes[0][:2] == shapes[1][:2] == shapes[2][:2]:
        return query, key, value
    try:
        (batch,) = torch.broadcast_shapes(*(shape[:1] for shape in shapes))
        (heads,) = (-1,) if enable_gqa else torch.broadcast_shapes(*(shape[1:2] for shape in shapes))
    except RuntimeError:
        # What differs is said by the checks.
        return query, key, value
    heads_kv = 1 if key.shape[1] == value.shape[1] == 1 else heads
    query = query.expand(batch, heads, -1, -1)
    return query, *(x.expand(batch, heads_kv, -1, -1) for x in (key, value))


def _with_other_axes(query, key, value, attn_mask, *options):
    """The same of tensors with fewer or more than four axes, or not as many each: the first are broadcast."""
    axes = max(query.dim(), key.dim(), value.dim())
    if attn_mask is not None and attn_mask.dim() > axes:
        raise InputError(
            f"attn_mask has {attn_mask.dim()} axes, and query, key and value have {axes}: give it no more"
        )
    query, key, value = (x[(None,) * (axes - x.dim())] for x in (query, key, value))
    if axes < 4:
        # Of one sequence.
        q, k, v = (x[(None,) * (4 - axes)] for x in (query, key, value))
    else:
        shapes = [tuple(x.shape) for x in (query, key, value)]
        try:
            batch = torch.broadcast_shapes(*(shape[:-3] for shape in shapes))
        except RuntimeError:
            raise InputError(
                f"query, key and value have the shapes {', '.join(map(str, shapes))}: their batches must be "
                "broadcast to each other"
            ) from None
        q, k, v = (x.expand(*batch, *x.shape[-3:]).flatten(0, -4) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dim() > 3:
            attn_mask = attn_mask.expand(*batch, *attn_mask.shape[-3:]).flatten(0, -4)
    out = _scaled(q, k, v, attn_mask, *options)
    if axes < 4:
        return out[(0,) * (4 - axes)]
    return out.unflatten(0, batch)
