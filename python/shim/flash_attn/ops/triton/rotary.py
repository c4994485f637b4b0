"""Stands in for flash_attn.ops.triton.rotary: rotary embedding in plain torch."""

import torch

from fa_attn import InputError


def _positions(x, seqlen_offsets, cu_seqlens):
    """The position of each row: (1 or batch, seqlen), of packed rows (total,)."""
    device = x.device
    if cu_seqlens is None:
        rows = torch.arange(x.shape[1], device=device)[None]
        return rows + torch.as_tensor(seqlen_offsets, device=device).long().reshape(-1, 1)
    starts = cu_seqlens.long()
    rows = torch.arange(x.shape[0], device=device)
    sequence = (torch.searchsorted(starts, rows, right=True) - 1).clamp(0, len(starts) - 2)
    offsets = torch.as_tensor(seqlen_offsets, device=device).long().expand(len(starts) - 1)
    return rows - starts[sequence] + offsets[sequence]


def _check(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen):
    rank = 4 if cu_seqlens is None else 3
    if x.dim() != rank:
        raise InputError(
            f"x has the shape {tuple(x.shape)}: it must have {rank} axes, 3 with cu_seqlens alone"
        )
    if cos.dim() != 2 or sin.shape != cos.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise InputError(
            f"cos and sin have the shapes {tuple(cos.shape)} and {tuple(sin.shape)}: both must be (positions, "
            f"rotary_dim / 2), with a rotary_dim up to x's head_dim of {x.shape[-1]}"
        )
    if isinstance(seqlen_offsets, torch.Tensor):
        batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if seqlen_offsets.shape != (batch,):
            raise InputError(
                f"seqlen_offsets has the shape {tuple(seqlen_offsets.shape)}: it must be an int or ({batch},)"
            )
        furthest = 0
    else:
        furthest = seqlen_offsets
    longest = x.shape[1] if cu_seqlens is None else max_seqlen
    if longest is not None and not 0 <= furthest <= cos.shape[0] - longest:
        raise InputError(
            f"cos and sin have {cos.shape[0]} positions: {longest} rows from position {furthest} on need "
            f"{longest + furthest}"
        )


def apply_rotary(
    x,
    cos,
    sin,
    seqlen_offsets=0,
    cu_seqlens=None,
    max_seqlen=None,
    interleaved=False,
    inplace=False,
    conjugate=False,
):
    """x (batch, seqlen, heads, dim), or (total, heads, dim) with cu_seqlens; cos and sin (positions,
    rotary_dim / 2). Row i of a sequence is rotated by the position `seqlen_offsets` + i, and not at all where
    the tables have no such position; `conjugate`: backwards."""
    _check(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    known = ((positions >= 0) & (positions < cos.shape[0]))[..., None]
    at = positions.clamp(0, cos.shape[0] - 1)
    c, s = cos.float()[at].where(known, 1.0), sin.float()[at].where(known, 0.0)
    return rotated(x, c, -s if conjugate else s, interleaved, inplace)


def rotated(x, cos, sin, interleaved, inplace):
    """x (..., rows, heads, dim) rotated by tables of its rows, (..., rows, rotary_dim / 2)."""
    half = cos.shape[-1]
    c, s = cos.float()[..., None, :], sin.float()[..., None, :]
    low = (..., slice(0, 2 * half, 2)) if interleaved else (..., slice(0, half))
    high = (..., slice(1, 2 * half, 2)) if interleaved else (..., slice(half, 2 * half))
    a, b = x[low].float(), x[high].float()
    out = x if inplace else x.clone()
    turned_low, turned_high = (a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype)
    out[low], out[high] = turned_low, turned_high
    return out
