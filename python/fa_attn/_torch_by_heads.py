"""Attention in torch's layout: tensors (batch, heads, seqlen, head_dim), computed as rows of heads."""

from __future__ import annotations

from typing import Optional

import torch

from ._checks import number
from ._core import InputError, InputTypeError
from ._modifications import Modifications
from ._options import call_options
from ._torch_memory import PLAIN, is_compiling
from .torch import attention, plain_attention


def attention_by_heads(q, k, v, mods: Optional[Modifications], scale, causal=False, offset=0, wants_lse=True):
    """(out, lse) in torch's layout; without `wants_lse` lse may be None."""
    if mods is None and offset == 0 and type(q) in PLAIN and not is_compiling():
        made = _at_once(q, k, v, scale, causal, wants_lse)
        if made is not None:
            out, lse = made if wants_lse else (made, None)
            return out.transpose(1, 2), lse
    options = call_options(number("scale", scale), causal, (-1, -1), 0.0, False, offset)
    options = options._replace(by_heads=_lies_by_heads(q))
    out, lse = attention(q, k, v, options, None, mods=mods, wants_lse=wants_lse)
    return out.transpose(1, 2), lse


def _at_once(q, k, v, scale, causal, wants_lse):
    """The results of a call that the extension module reads and computes alone, else None."""
    room = None
    if _lies_by_heads(q):
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            return None
        batch, rows, heads, _ = q.shape
        room = q.new_empty((batch, heads, rows, v.shape[-1])).transpose(1, 2)
    numbers, results = (scale, causal, (-1, -1), 0.0, False), (room, wants_lse, False, False)
    return plain_attention(q, k, v, numbers, results, None, (), {})


def _lies_by_heads(q):
    """Whether heads of a tensor (batch, rows, heads, columns) lie one after another, rows within them."""
    return q.shape[1] > 1 and q.shape[2] > 1 and q.stride(1) < q.stride(2)


def rows_of_heads(query, key, value, enable_gqa):
    """q, k and v with heads behind rows."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise InputTypeError(f"{name} is {type(x).__name__}: it must be a torch tensor")
        if x.dim() != 4:
            raise InputError(
                f"{name} has the shape {tuple(x.shape)}: it must be (batch, heads, seqlen, head_dim)"
            )
    heads, heads_kv = query.shape[1], key.shape[1]
    if heads != heads_kv and not enable_gqa:
        raise InputError(
            f"query has {heads} heads and key {heads_kv}: set enable_gqa, or repeat the keys' heads"
        )
    if value.shape[1] != heads_kv:
        raise InputError(f"key has {heads_kv} heads and value {value.shape[1]}: they must be equal")
    if key.shape[0] == 1 and query.shape[0] != 1:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
