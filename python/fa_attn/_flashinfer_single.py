"""FlashInfer's attention of one request."""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch

from ._core import InputError
from ._flashinfer import (
    Results,
    by_rows,
    check_layout,
    dtype_of,
    keywords,
    of_codes,
    refuse,
    rotated,
    scores_of,
    unpacked_bits,
)
from ._flashinfer_plans import descales_of
from .interface import flash_attn_func

Tensor = torch.Tensor


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Optional[Tensor] = None,
    scale_k: Optional[Tensor] = None,
    scale_v: Optional[Tensor] = None,
    o_dtype: Optional[torch.dtype] = None,
    custom_mask: Optional[Tensor] = None,
    packed_custom_mask: Optional[Tensor] = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: Optional[float] = None,
    window_left: int = -1,
    logits_soft_cap: Optional[float] = None,
    rope_scale: Optional[float] = None,
    rope_theta: Optional[float] = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: None = None,
    k_scale: Optional[float] = None,
    v_scale: Optional[float] = None,
) -> Any:
    """Attention of one request: q (rows, heads_q, head_dim), k and v (keys, heads_kv, head_dim), with 'HND'
    (heads_kv, keys, head_dim). `custom_mask` (rows, keys), True where a key is seen, or its bits, the lowest
    first, as `packbits` gives them: instead of `causal`."""
    refuse(kv_cache_sf=kv_cache_sf)
    scores = scores_of(
        causal, window_left, logits_soft_cap, sm_scale, pos_encoding_mode, rope_scale, rope_theta
    )
    check_layout(kv_layout)
    k, v = by_rows(k, kv_layout), by_rows(v, kv_layout)
    rows, keys = q.shape[0], k.shape[0]
    mask = custom_mask
    if packed_custom_mask is not None:
        mask = unpacked_bits(packed_custom_mask, rows * keys)
    if mask is not None:
        if mask.numel() != rows * keys:
            raise InputError(f"the mask has {mask.numel()} elements: it must be ({rows}, {keys})")
        if mask.dtype.is_floating_point:
            raise InputError(f"custom_mask holds {mask.dtype}: it must hold truth values, True where seen")
        mask = mask.reshape(rows, keys).bool()
        scores = scores._replace(causal=False)
    dtype = dtype_of(o_dtype, q.dtype)
    q = of_codes(q, scale_q)
    if scores.encoding == "ROPE_LLAMA":
        ends = torch.arange(keys - rows, keys, device=q.device)
        k = k.to(q.dtype)
        q, k = rotated(q, ends, scores), rotated(k, torch.arange(keys, device=q.device), scores)
        v = v.to(q.dtype)
    call = keywords(scores, q, k_scale=k_scale, descales=descales_of(scale_k, scale_v))
    made, lse = flash_attn_func(q[None], k[None], v[None], mask=mask, return_softmax_lse=True, **call)
    return Results(dtype, v_scale, wants_lse=return_lse).of(made[0], lse[0])


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Optional[float] = None,
    k_scale: Optional[float] = None,
    v_scale: Optional[float] = None,
    window_left: int = -1,
    logits_soft_cap: Optional[float] = None,
    sm_scale: Optional[float] = None,
    rope_scale: Optional[float] = None,
    rope_theta: Optional[float] = None,
    return_lse: bool = False,
) -> Any:
    """Attention of one token: q (heads_q, head_dim), k and v (keys, heads_kv, head_dim), or with 'HND'
    (heads_kv, keys, head_dim). Returns out (heads_q, head_dim) and lse (heads_q,)."""
    if q_scale is not None:
        sm_scale = (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale) * q_scale
    out, lse = single_prefill_with_kv_cache(
        q[None],
        k,
        v,
        kv_layout=kv_layout,
        pos_encoding_mode=pos_encoding_mode,
        sm_scale=sm_scale,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=True,
    )
    return (out[0], lse[0]) if return_lse else out[0]
