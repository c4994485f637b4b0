"""What kernels do not compute for torch's functions of attention, by torch's operations: float64, with all
scores in memory and derivatives of every order, as checks of gradients need them, and tensors without heads
or columns."""

from __future__ import annotations

import math

import torch

from ._blocks import PARTIAL
from ._core import UnsupportedError


def is_composed(query, key, value):
    """Whether a call of torch's functions is computed here."""
    for x in (query, key, value):
        if not isinstance(x, torch.Tensor) or x.dim() < 3 or x.dtype is not query.dtype:
            return False
    return query.dtype is torch.float64 or 0 in (query.shape[-1], query.shape[-3], value.shape[-1])


def attention(q, k, v, scale, change=None, visible=None, dropout_p=0.0):
    """(out, LSE, largest scores) of tensors (batch, heads, rows, columns). `change`: what scores become,
    `visible`: bool, broadcast to the scores."""
    group = q.shape[1] // max(k.shape[1], 1)
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (max(q.shape[-1], 1) ** -0.5 if scale is None else scale)
    scores = scores if change is None else change(scores)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if not scores.shape[-1]:
        nothing = q.new_full(q.shape[:-1], -math.inf)
        return scores @ v, nothing, nothing
    largest = scores.detach().amax(-1, keepdim=True)
    top = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    is_blind = total == 0
    total = total.masked_fill(is_blind, 1.0)
    weights = torch.nn.functional.dropout(weights / total, dropout_p)
    lse = (total.log() + top).masked_fill(is_blind, -math.inf)
    return weights @ v, lse[..., 0], largest[..., 0]


def masked(attn_mask, causal_offset, rows, keys, device):
    """(change, visible) of scaled_dot_product_attention's mask and of a causal one, moved by its offset."""
    visible, change = None, None
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        visible = attn_mask
    elif attn_mask is not None:

        def change(scores):
            # A mask of float32 beside 16 bits leaves what follows in their type.
            return (scores + attn_mask).to(scores.dtype)

    if causal_offset is not None:
        places = torch.arange(keys, device=device) - torch.arange(rows, device=device)[:, None]
        seen = places <= causal_offset
        visible = seen if visible is None else visible & seen
    return change, visible


def by_function(score_mod):
    """What a function (score, b, h, q_idx, kv_idx) makes of scores."""
    if score_mod is None:
        return None
    _check_function("score_mod", score_mod)
    return lambda scores: _mapped(score_mod, scores.shape, scores.device, scores)


def of_blocks(block_mask, extents, device):
    """What a BlockMask of ours shows, bool (1 or batch, .., rows, keys)."""
    function, visible = block_mask.mask_mod, None
    lengths = (extents.rows, extents.keys)
    if function is not None:
        _check_function("mask_mod", function)
        sizes = (extents.batch, extents.heads, *lengths)
        visible = _mapped(function, sizes, device).bool()
    if block_mask.states is None:
        return visible
    states = block_mask.states.to(device)
    for axis, size, length in zip((2, 3), block_mask.BLOCK_SIZE, lengths):
        # A block may be longer than any axis.
        places = torch.arange(length, device=device) // size
        states = states.index_select(axis, places)
    return states > 0 if visible is None else torch.where(states == PARTIAL, visible, states > 0)


def _check_function(name, function):
    if isinstance(function, str) or not callable(function):
        raise UnsupportedError(f"{name} of float64: give a function, not a program")


def _mapped(function, sizes, device, *first):
    """A function of indices, of what lies at them and of them, for all of `sizes`."""
    at = [0] * len(first)
    for axis in reversed(range(4)):
        places = [0 if other == axis else None for other in range(4)]
        function = torch.vmap(function, in_dims=(*at, *places))
    return function(*first, *(torch.arange(size, device=device) for size in sizes))
