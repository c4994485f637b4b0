"""Stands in for flash_attn.layers.rotary: rotary embedding in plain torch."""

import torch


def apply_rotary_emb(
    x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None
):
    """x (batch, seqlen, heads, dim), or (total, heads, dim) with cu_seqlens; cos and sin (positions,
    rotary_dim / 2). Row i of a sequence is turned by the position `seqlen_offsets` + i."""
    half = cos.shape[-1]
    device = x.device
    if cu_seqlens is None:
        rows = torch.arange(x.shape[1], device=device)[None]
        offsets = torch.as_tensor(seqlen_offsets, device=device).reshape(-1, 1)
        positions = (rows + offsets).expand(x.shape[0], -1)
    else:
        starts = cu_seqlens.long()
        sequence = torch.searchsorted(starts, torch.arange(x.shape[0], device=device), right=True) - 1
        sequence = sequence.clamp(0, len(starts) - 2)
        offsets = torch.as_tensor(seqlen_offsets, device=device).long().expand(len(starts) - 1)
        positions = torch.arange(x.shape[0], device=device) - starts[sequence] + offsets[sequence]
    positions = positions.long().clamp(0, cos.shape[0] - 1)
    c, s = (table.float()[positions][..., None, :] for table in (cos, sin))
    low = (..., slice(0, 2 * half, 2)) if interleaved else (..., slice(0, half))
    high = (..., slice(1, 2 * half, 2)) if interleaved else (..., slice(half, 2 * half))
    a, b = x[low].float(), x[high].float()
    out = x if inplace else x.clone()
    turned_low, turned_high = (a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype)
    out[low], out[high] = turned_low, turned_high
    return out
