"""Stands in for flash_attn.layers.rotary: rotary embedding in plain torch."""

import torch


def apply_rotary_emb(
    x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None
):
    """x (batch, seqlen, heads, dim), or (total, heads, dim) with cu_seqlens; cos and sin (positions,
    rotary_dim / 2). Row i of a sequence is rotated by the position `seqlen_offsets` + i."""
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


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x, cos, sin, interleaved=False):
    """The same for x (batch, seqlen, heads, dim), from position 0 on."""
    return apply_rotary_emb(x, cos, sin, interleaved)


def apply_rotary_emb_qkv_(
    qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None
):
    """Rotates q and k in qkv (batch, seqlen, 3, heads, dim), or (batch, seqlen, heads, dim) with
    `num_heads_q`, in place."""
    if qkv.dim() == 5:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    else:
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_k]
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    cos_k, sin_k = (cos if cos_k is None else cos_k), (sin if sin_k is None else sin_k)
    apply_rotary_emb(k, cos_k, sin_k, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0):
    """Rotates k in kv (batch, seqlen, 2, heads, dim), in place."""
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv
