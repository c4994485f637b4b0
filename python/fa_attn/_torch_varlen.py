"""Torch's varlen_attn: attention of sequences that are packed end to end."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple, Union

import torch

from . import _torch_composed as composed
from ._checks import number, window
from ._core import InputTypeError
from .interface import flash_attn_varlen_func


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Optional[Any] = None,
    scale: Optional[float] = None,
    window_size: Sequence[int] = (-1, -1),
) -> Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]:
    """Torch's varlen_attn (torch.nn.attention.varlen): query (total_q, heads, head_dim), key (total_k,
    heads_kv, head_dim), value (total_k, heads_kv, head_dim_v), where heads_kv divides heads.

    `cu_seq_q`, `cu_seq_k`: int32 (batch + 1,), the first row of each sequence, then the end of the last.
    `max_q`, `max_k`: upper bounds on their lengths. `window_size`: keys to the left and to the right that a
    query sees, -1 for all, aligned at the bottom right: (-1, 0) is causal. Returns out, or with `return_aux`,
    an AuxRequest whose `lse` is true, (out, LSE (heads, total_q)), float32. Unlike torch's, the LSE of a row
    that sees no key is -inf, not inf, and LSE has a gradient.
    """
    left, right = window(window_size)
    wants_lse = return_aux is not None and bool(return_aux.lse)
    if composed.is_composed(query, key, value):
        out, lse = _composed(query, key, value, cu_seq_q, cu_seq_k, scale, left, right)
    else:
        for name, starts in (("cu_seq_q", cu_seq_q), ("cu_seq_k", cu_seq_k)):
            if starts is None:
                raise InputTypeError(f"{name} is None: it must be a tensor of int32, (batch + 1,)")
        out, lse = flash_attn_varlen_func(
            query,
            key,
            value,
            cu_seq_q,
            cu_seq_k,
            max_q,
            max_k,
            softmax_scale=scale,
            window_size=(left, right),
            return_softmax_lse=True,
        )
    return (out, lse) if wants_lse else out


def _composed(query, key, value, cu_seq_q, cu_seq_k, scale, left, right):
    """The same by torch's operations, as one sequence in which each row sees the keys of its own."""
    lengths = cu_seq_k.diff() - cu_seq_q.diff()

    def placed(starts, rows):
        at = torch.arange(rows, device=query.device)
        own = torch.searchsorted(starts.to(at.dtype), at, right=True) - 1
        # Rows behind the last sequence are nobody's.
        own = own.masked_fill(own >= starts.numel() - 1, -1)
        return own, at - starts[own.clamp(min=0)]

    (of_q, rows), (of_k, keys) = placed(cu_seq_q, query.shape[0]), placed(cu_seq_k, key.shape[0])
    distance = keys - (rows + lengths[of_q.clamp(min=0)])[:, None]
    visible = (of_q[:, None] == of_k) & (of_q[:, None] >= 0)
    if left >= 0:
        visible = visible & (distance >= -left)
    if right >= 0:
        visible = visible & (distance <= right)
    tensors = (x.transpose(0, 1)[None] for x in (query, key, value))
    out, lse, _ = composed.attention(*tensors, number("scale", scale), None, visible)
    return out[0].transpose(0, 1), lse[0].float()
