"""FlashInfer's attention: its functions and wrappers for single requests, packed and paged batches, decoding,
latents (MLA), cascades and merges, by its names, arguments, layouts and results.

>>> import fa_attn.flashinfer as flashinfer
>>> wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
>>> wrapper.plan(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, 32, 8, 128, 16, causal=True)
>>> out, lse = wrapper.run(q, paged_kv_cache, return_lse=True)

`stand_in()` enters them as `flashinfer` and its modules, for programs that import those.

LSE is (rows, heads) in base 2, as there. Masks and windows are aligned to the bottom right. Torch's tensors,
on GPUs and on the CPU. A plan makes the page table and its lengths once, and copies starts to the host, as
FlashInfer's does; a run launches. With `use_cuda_graph` tables have a fixed place and later plans are seen by
captured calls; a sequence has then at most the pages of the table, all of the buffer's where batch times
buffer is up to 4 Mi, and else at least the buffer's even share. What lies in buffers counts when plan() is
called, not later.

`pos_encoding_mode`: 'ALIBI' is a score function; 'ROPE_LLAMA' turns q and a packed copy of the keys by
torch's operations in each call. Caches are of q's type, float8_e4m3fn or float8_e5m2; factors (`k_scale`,
`v_scale`, ..) are numbers or tensors of one element.

Accepted and not needed: workspaces, `backend`, `use_tensor_cores`, `use_fp16_qk_reduction`, `enable_pdl`,
`non_blocking`, `use_profiler`, and lengths and tables that repeat the starts (`seq_lens`, `block_tables`,
`max_token_per_sequence`, `max_item_len_ptr`, ..). `disable_split_kv` and `fixed_split_size` leave keys
undivided: a row's bits do not depend on its batch. Refused by name: `jit_args`, NVFP4 caches
(`kv_cache_sf`), skipped softmax. There are no gradients.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
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
from ._flashinfer_cascade import MultiLevelCascadeAttentionWrapper
from ._flashinfer_decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from ._flashinfer_mla import BatchMLAPagedAttentionWrapper
from ._flashinfer_pages import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    merge_state,
    merge_state_in_place,
    merge_states,
    packbits,
    segment_packbits,
)
from ._flashinfer_plans import descales_of
from ._flashinfer_prefill import (
    BatchAttention,
    BatchAttentionWithAttentionSinkWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)
from .interface import flash_attn_func

Tensor = torch.Tensor

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "packbits",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "stand_in",
]


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
        mask = mask.reshape(rows, keys).bool()
        scores = scores._replace(causal=False)
    dtype = dtype_of(o_dtype, q.dtype)
    q = of_codes(q, scale_q)
    if scores.encoding == "ROPE_LLAMA":
        ends = torch.arange(keys - rows, keys, device=q.device)
        k = k.to(q.dtype)
        q, k = rotated(q, ends, scores), rotated(k, torch.arange(keys, device=q.device), scores)
        v = v.to(q.dtype)
    call = keywords(scores, q, q.shape[1], k_scale=k_scale, descales=descales_of(scale_k, scale_v))
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


_MODULES = {
    "prefill": (
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "single_prefill_with_kv_cache",
        "single_prefill_with_kv_cache_return_lse",
    ),
    "decode": (
        "BatchDecodeWithPagedKVCacheWrapper",
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
        "fast_decode_plan",
        "single_decode_with_kv_cache",
    ),
    "cascade": ("MultiLevelCascadeAttentionWrapper", "merge_state", "merge_state_in_place", "merge_states"),
    "page": (
        "append_paged_kv_cache",
        "append_paged_mla_kv_cache",
        "get_batch_indices_positions",
        "get_seq_lens",
    ),
    "mla": ("BatchMLAPagedAttentionWrapper",),
    "attention": ("BatchAttention", "BatchAttentionWithAttentionSinkWrapper"),
    "quantization": ("packbits", "segment_packbits"),
}


def stand_in() -> None:
    """Enters these as `flashinfer` and its modules (`flashinfer.prefill`, ..). Where FlashInfer is installed
    its other functions stay, such as those that sample, and these take the place of its own; programs that
    have imported its names before keep them."""
    is_there = "flashinfer" in sys.modules or importlib.util.find_spec("flashinfer") is not None
    whole = importlib.import_module("flashinfer") if is_there else _module("flashinfer")
    whole.__dict__.setdefault("__path__", [])
    for place, names in _MODULES.items():
        name = f"flashinfer.{place}"
        part = importlib.import_module(name) if is_there else _module(name)
        setattr(whole, place, part)
        for function in names:
            setattr(part, function, globals()[function])
            setattr(whole, function, globals()[function])


def _module(name):
    made = sys.modules[name] = types.ModuleType(name, f"Attention of {name}, by fa_attn.flashinfer.")
    made.__getattr__ = _missing  # type: ignore[method-assign]
    return made


def _missing(name):
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(f"fa_attn.flashinfer has no {name}: it has FlashInfer's attention, pages and merges")
