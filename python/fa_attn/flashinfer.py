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
torch's operations in each call. Caches are of q's type or float8_e4m3fn; factors (`k_scale`, `v_scale`, ..)
are numbers or tensors of one element.

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
from typing import Any, List, Optional, Sequence, Tuple, Union

import torch

from ._checks import count
from ._core import InputError, UnsupportedError
from ._flashinfer import (
    LOG2_E,
    Results,
    by_rows,
    caches_of,
    check_buffer,
    check_layout,
    dtype_of,
    keywords,
    of_codes,
    on_host,
    page_lengths,
    places_of,
    refuse,
    rotated,
    scores_of,
    starts_of,
    unpacked_bits,
    with_page,
)
from ._flashinfer_decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
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
from ._flashinfer_plans import PagedPlan, Plan, descales_of
from .interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Tensor = torch.Tensor
Cache = Union[Tensor, Tuple[Tensor, Tensor]]

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


class BatchPrefillWithPagedKVCacheWrapper(PagedPlan):
    """Prefill, or any number of new tokens of each request, on a paged cache."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Optional[Tensor] = None,
        paged_kv_indptr_buf: Optional[Tensor] = None,
        paged_kv_indices_buf: Optional[Tensor] = None,
        paged_kv_last_page_len_buf: Optional[Tensor] = None,
        custom_mask_buf: Optional[Tensor] = None,
        mask_indptr_buf: Optional[Tensor] = None,
        backend: str = "auto",
        jit_args: None = None,
        jit_kwargs: Any = None,
    ) -> None:
        refuse(jit_args=jit_args)
        buffers = (paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)
        if use_cuda_graph and qo_indptr_buf is None:
            raise InputError("use_cuda_graph without qo_indptr_buf: give a tensor of (batch + 1,)")
        if use_cuda_graph:
            check_buffer("qo_indptr", qo_indptr_buf, self.device)
        self._starts = qo_indptr_buf if use_cuda_graph else None
        self._mask_buffers = (custom_mask_buf, mask_indptr_buf)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: Optional[int] = None,
        custom_mask: Optional[Tensor] = None,
        packed_custom_mask: Optional[Tensor] = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: Optional[float] = None,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        q_data_type: Union[str, torch.dtype] = "float16",
        kv_data_type: Optional[Union[str, torch.dtype]] = None,
        o_data_type: Optional[Union[str, torch.dtype]] = None,
        non_blocking: bool = True,
        prefix_len_ptr: Optional[Tensor] = None,
        token_pos_in_items_ptr: Optional[Tensor] = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Optional[Tensor] = None,
        seq_lens: Optional[Tensor] = None,
        seq_lens_q: Optional[Tensor] = None,
        block_tables: Optional[Tensor] = None,
        max_token_per_sequence: Optional[int] = None,
        max_sequence_kv: Optional[int] = None,
        fixed_split_size: Optional[int] = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Sets the lengths, pages, masks and scores of the runs that follow. Request i has the queries
        `qo_indptr[i]` to `qo_indptr[i + 1]` and the pages that `paged_kv_indices` names from
        `paged_kv_indptr[i]` on, the last with `paged_kv_last_page_len[i]` keys. `custom_mask`: flat
        (queries, keys) of the requests in turn; `packed_custom_mask`: its bits, by `segment_packbits`."""
        scores = scores_of(
            causal, window_left, logits_soft_cap, sm_scale, pos_encoding_mode, rope_scale, rope_theta
        )
        starts = starts_of("qo_indptr", qo_indptr)
        indptr = starts_of("paged_kv_indptr", paged_kv_indptr, paged_kv_indices.shape[0])
        if starts.shape != indptr.shape:
            raise InputError(
                f"qo_indptr has {starts.shape[0]} elements and paged_kv_indptr {indptr.shape[0]}: as many"
            )
        page_size = count("page_size", page_size, 1)
        lengths = page_lengths(indptr, on_host(paged_kv_last_page_len), page_size)
        given = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._pages.plan(indptr, paged_kv_indices, lengths, page_size, given)
        self._total, rows = int(starts[-1]), starts.diff()
        self._longest = int(rows.max()) if rows.numel() else 0
        if self._captures:
            self._starts.copy_(starts)
        else:
            self._starts = starts.to(self.device, torch.int32)
        undivided = disable_split_kv or (fixed_split_size is not None and fixed_split_size > 0)
        types = (q_data_type, kv_data_type, o_data_type)
        self._set(scores, (num_qo_heads, num_kv_heads), head_dim_qk, types, undivided)
        self._set_mask(custom_mask, packed_custom_mask, rows, lengths, self._mask_buffers)
        items = (prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len)
        self._set_items(*items, rows.shape[0])

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: Optional[float] = None,
        k_scale: Optional[float] = None,
        v_scale: Optional[float] = None,
        out: Optional[Tensor] = None,
        lse: Optional[Tensor] = None,
        return_lse: bool = False,
        enable_pdl: Optional[bool] = None,
        window_left: Optional[int] = None,
        sinks: Optional[Tensor] = None,
        kv_cache_sf: None = None,
        skip_softmax_threshold_scale_factor: None = None,
        use_fp16_softmax: Optional[bool] = None,
        uses_spcompress: Optional[bool] = None,
    ) -> Any:
        """out (queries, heads_q, head_dim_v), with `return_lse` (out, lse); q (queries, heads_q, head_dim),
        `paged_kv_cache` (pages, 2, page, heads_kv, head_dim), with 'HND' (pages, 2, heads_kv, page,
        head_dim), or (k_cache, v_cache)."""
        refuse(
            kv_cache_sf=kv_cache_sf,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            use_fp16_softmax=use_fp16_softmax,
            uses_spcompress=uses_spcompress,
        )
        k, v = caches_of(paged_kv_cache, self._layout)
        self._check(q, k)
        if q.shape[0] != self._total:
            raise InputError(f"q has {q.shape[0]} rows: the plan's qo_indptr ends at {self._total}")
        results = Results(self._types[2], v_scale, out, lse, return_lse)
        longest = q.shape[0] if self._captures else self._longest
        scales = (q_scale, k_scale)
        return self._attention(q, k, v, self._starts, longest, results, window_left, scales, sinks, args)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Optional[float] = None,
        v_scale: Optional[float] = None,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """`run`, as older programs call it: scores are made of these arguments instead of the plan's."""
        self._old(causal, (window_left, logits_soft_cap, sm_scale, pos_encoding_mode, rope_scale, rope_theta))
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """`BatchPrefillWithPagedKVCacheWrapper` whose runs take sinks: run(q, cache, sinks, sm_scale)."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Optional[Tensor] = None,
        paged_kv_indptr_buf: Optional[Tensor] = None,
        paged_kv_indices_buf: Optional[Tensor] = None,
        paged_kv_last_page_len_buf: Optional[Tensor] = None,
        custom_mask_buf: Optional[Tensor] = None,
        mask_indptr_buf: Optional[Tensor] = None,
        backend: str = "auto",
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
        )

    def run(  # type: ignore[override]
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        sinks: Optional[Tensor] = None,
        sm_scale: Any = None,
        **options,
    ) -> Any:
        if sm_scale is not None:
            self._scores = self._scores._replace(scale=float(sm_scale))
        return super().run(q, paged_kv_cache, sinks=sinks, **options)

    run_return_lse = functools.partialmethod(run, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(Plan):
    """Prefill of packed requests: q, k and v lie one request after another."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Optional[Tensor] = None,
        kv_indptr_buf: Optional[Tensor] = None,
        custom_mask_buf: Optional[Tensor] = None,
        mask_indptr_buf: Optional[Tensor] = None,
        backend: str = "auto",
        jit_args: None = None,
        jit_kwargs: Any = None,
    ) -> None:
        refuse(jit_args=jit_args)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._starts = [qo_indptr_buf, kv_indptr_buf]
        if use_cuda_graph and None in self._starts:
            raise InputError("use_cuda_graph without qo_indptr_buf and kv_indptr_buf: give both")
        if use_cuda_graph:
            check_buffer("qo_indptr", qo_indptr_buf, self.device)
            check_buffer("kv_indptr", kv_indptr_buf, self.device)
        self._mask_buffers = (custom_mask_buf, mask_indptr_buf)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: Optional[int] = None,
        custom_mask: Optional[Tensor] = None,
        packed_custom_mask: Optional[Tensor] = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        q_data_type: Union[str, torch.dtype] = "float16",
        kv_data_type: Optional[Union[str, torch.dtype]] = None,
        o_data_type: Optional[Union[str, torch.dtype]] = None,
        non_blocking: bool = True,
        prefix_len_ptr: Optional[Tensor] = None,
        token_pos_in_items_ptr: Optional[Tensor] = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Optional[Tensor] = None,
        fixed_split_size: Optional[int] = None,
        disable_split_kv: bool = False,
        seq_lens: Optional[Tensor] = None,
        seq_lens_q: Optional[Tensor] = None,
        max_token_per_sequence: Optional[int] = None,
        max_sequence_kv: Optional[int] = None,
        v_indptr: None = None,
        o_indptr: None = None,
    ) -> None:
        """Sets the lengths, masks and scores of the runs that follow."""
        refuse(v_indptr=v_indptr, o_indptr=o_indptr)
        scores = scores_of(
            causal, window_left, logits_soft_cap, sm_scale, pos_encoding_mode, rope_scale, rope_theta
        )
        hosts = [starts_of("qo_indptr", qo_indptr), starts_of("kv_indptr", kv_indptr)]
        if hosts[0].shape != hosts[1].shape:
            raise InputError(
                f"qo_indptr has {hosts[0].shape[0]} elements and kv_indptr {hosts[1].shape[0]}: as many"
            )
        rows, keys = (host.diff() for host in hosts)
        self._totals = [int(host[-1]) for host in hosts]
        self._longest = [int(x.max()) if x.numel() else 0 for x in (rows, keys)]
        for at, host in enumerate(hosts):
            if self._captures:
                self._starts[at].copy_(host)
            else:
                self._starts[at] = host.to(self.device, torch.int32)
        undivided = disable_split_kv or (fixed_split_size is not None and fixed_split_size > 0)
        types = (q_data_type, kv_data_type, o_data_type)
        self._set(scores, (num_qo_heads, num_kv_heads), head_dim_qk, types, undivided)
        self._set_mask(custom_mask, packed_custom_mask, rows, keys, self._mask_buffers)
        items = (prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len)
        self._set_items(*items, rows.shape[0])

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: Optional[float] = None,
        k_scale: Optional[float] = None,
        v_scale: Optional[float] = None,
        o_scale: Optional[float] = None,
        out: Optional[Tensor] = None,
        lse: Optional[Tensor] = None,
        return_lse: bool = False,
        enable_pdl: Optional[bool] = None,
        kv_cache_sf: None = None,
    ) -> Any:
        """out (queries, heads_q, head_dim_v), with `return_lse` (out, lse); q (queries, heads_q, head_dim), k
        and v (keys, heads_kv, head_dim)."""
        refuse(kv_cache_sf=kv_cache_sf, o_scale=o_scale)
        k, v = by_rows(k, self._layout), by_rows(v, self._layout)
        self._check(q, k)
        totals = [q.shape[0], k.shape[0]]
        if totals[0] != self._totals[0] or totals[1] < self._totals[1]:
            raise InputError(f"q and k have {totals} rows: the plan's starts end at {self._totals}")
        descales = {}
        if args:
            if len(args) != 3 or q.dtype.itemsize != 1:
                raise UnsupportedError("run() takes no further arguments by position: they are of jit_args")
            q, descales = of_codes(q, args[0]), descales_of(*args[1:])
        scores, longest = self._scores, totals if self._captures else self._longest
        if scores.encoding == "ROPE_LLAMA":
            k, v = k.to(q.dtype), v.to(q.dtype)
            rows, keys = (starts.diff() for starts in self._starts)
            (of_row, at, _), (_, place, _) = places_of(rows, q.shape[0]), places_of(keys, self._totals[1])
            q = rotated(q, at + (keys - rows)[of_row], scores)
            k, v = rotated(k[: self._totals[1]], place, scores), v[: self._totals[1]]
        call = keywords(
            scores,
            q,
            q.shape[1],
            q_scale=q_scale,
            k_scale=k_scale,
            descales=descales,
            mask=self._mask,
        )
        results = Results(self._types[2], v_scale, out, lse, return_lse)
        made, made_lse = flash_attn_varlen_func(
            q,
            k,
            v,
            *self._starts,
            *longest,
            out=results.room((*q.shape[:-1], v.shape[-1]), q.dtype),
            return_softmax_lse=True,
            num_splits=self._splits,
            **call,
        )
        return results.of(made, made_lse)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """`run`, as older programs call it: scores are made of these arguments instead of the plan's."""
        self._old(causal, (window_left, logits_soft_cap, sm_scale, pos_encoding_mode, rope_scale, rope_theta))
        return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class BatchAttention(PagedPlan):
    """Prefill and decoding of one batch on a paged cache, whose lengths are given."""

    def __init__(self, kv_layout: str = "NHD", device: str = "cuda") -> None:
        super().__init__(torch.empty(0, device=device), kv_layout, False, None)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: Optional[float] = None,
        logits_soft_cap: Optional[float] = None,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Sets the lengths, pages and scores of the runs that follow; `kv_len_arr`: keys of each request."""
        scores = scores_of(causal, -1, logits_soft_cap, sm_scale, "NONE", None, None)
        starts = starts_of("qo_indptr", qo_indptr)
        lengths, kv_indptr = on_host(kv_len_arr), kv_indptr[: starts.shape[0]]
        indptr = starts_of("kv_indptr", kv_indptr, kv_indices.shape[0])
        given = (kv_indptr, kv_indices, kv_len_arr)
        self._pages.plan(indptr, kv_indices, lengths, count("page_size", page_size, 1), given)
        self._total, rows = int(starts[-1]), starts.diff()
        self._longest = int(rows.max()) if rows.numel() else 0
        self._starts = starts.to(self.device, torch.int32)
        types = (q_data_type, kv_data_type, None)
        self._set(scores, (num_qo_heads, num_kv_heads), head_dim_qk, types, False)

    def run(
        self,
        q: Tensor,
        kv_cache: Cache,
        out: Optional[Tensor] = None,
        lse: Optional[Tensor] = None,
        k_scale: Optional[float] = None,
        v_scale: Optional[float] = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: None = None,
        kv_cache_sf: None = None,
    ) -> Tuple[Tensor, Tensor]:
        """(out, lse)."""
        refuse(profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf)
        k, v = caches_of(kv_cache, self._layout)
        self._check(q, k)
        if logits_soft_cap:
            self._scores = self._scores._replace(soft_cap=float(logits_soft_cap))
        if q.shape[0] != self._total:
            raise InputError(f"q has {q.shape[0]} rows: the plan's qo_indptr ends at {self._total}")
        results = Results(self._types[2], v_scale, out, lse, True)
        scales = (None, k_scale)
        return self._attention(q, k, v, self._starts, self._longest, results, None, scales)


class BatchMLAPagedAttentionWrapper(PagedPlan):
    """Multi-head latent attention (MLA) on a paged cache of latents and rotary columns."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Optional[Tensor] = None,
        kv_indptr: Optional[Tensor] = None,
        kv_indices: Optional[Tensor] = None,
        kv_len_arr: Optional[Tensor] = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, "NHD", use_cuda_graph, (kv_indptr, kv_indices, kv_len_arr))
        if use_cuda_graph and qo_indptr is None:
            raise InputError("use_cuda_graph without qo_indptr: give a tensor of (batch + 1,)")
        if use_cuda_graph:
            check_buffer("qo_indptr", qo_indptr, self.device)
        self._starts = qo_indptr if use_cuda_graph else None

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Sets the lengths, pages and scores of the runs that follow; `kv_len_arr`: keys of each request."""
        scores = scores_of(causal, -1, None, sm_scale, "NONE", None, None)
        starts = starts_of("qo_indptr", qo_indptr)
        lengths, kv_indptr = on_host(kv_len_arr), kv_indptr[: starts.shape[0]]
        indptr = starts_of("kv_indptr", kv_indptr, kv_indices.shape[0])
        given = (kv_indptr, kv_indices, kv_len_arr)
        self._pages.plan(indptr, kv_indices, lengths, count("page_size", page_size, 1), given)
        rows = starts.diff()
        self._total, self._longest = int(starts[-1]), int(rows.max()) if rows.numel() else 0
        if self._captures:
            self._starts.copy_(starts)
        else:
            self._starts = starts.to(self.device, torch.int32)
        self._set(scores, (num_heads, 1), head_dim_ckv, (q_data_type, kv_data_type, None), False)

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Optional[Tensor] = None,
        lse: Optional[Tensor] = None,
        return_lse: bool = False,
        profiler_buffer: None = None,
        kv_len: Optional[Tensor] = None,
        page_table: Optional[Tensor] = None,
        return_lse_base_on_e: bool = False,
        o_scale: None = None,
        *,
        ckv_scale: Optional[float] = None,
        ckv_scale_arr: None = None,
        kpe_scale: Optional[float] = None,
    ) -> Any:
        """out (queries, heads, latents), with `return_lse` (out, lse), in base e with `return_lse_base_on_e`.
        q_nope (queries, heads, latents), q_pe (queries, heads, rotary columns), ckv_cache (pages, page,
        latents), kpe_cache (pages, page, rotary columns); caches of float8_e4m3fn are multiplied by
        `ckv_scale` and `kpe_scale`."""
        refuse(profiler_buffer=profiler_buffer, o_scale=o_scale, ckv_scale_arr=ckv_scale_arr)
        v, k = ckv_cache.unsqueeze(-2), kpe_cache.unsqueeze(-2)
        self._check(q_nope, v, ("q_nope", "ckv_cache"))
        for name, x, like in (("q_pe", q_pe, q_nope), ("kpe_cache", kpe_cache, ckv_cache)):
            if x.dtype != like.dtype:
                raise InputError(f"{name}.dtype is {x.dtype}: it must be {like.dtype}")
        scales, has_codes = (kpe_scale, ckv_scale), ckv_cache.dtype.itemsize == 1
        if any((scale is not None) != has_codes for scale in scales):
            need = "both belong to caches of float8_e4m3fn" if has_codes else "leave them out"
            raise InputError(
                f"ckv_scale is {ckv_scale} and kpe_scale {kpe_scale} with caches of {ckv_cache.dtype}: {need}"
            )
        if q_nope.shape[0] != self._total:
            raise InputError(f"q_nope has {q_nope.shape[0]} rows: the plan's qo_indptr ends at {self._total}")
        base = 1.0 if return_lse_base_on_e else LOG2_E
        results = Results(self._types[2], None, out, lse, return_lse, base)
        k, v = with_page(k), with_page(v)
        q, qv = q_pe, q_nope
        if not k.shape[-1]:
            q, k, qv = q_nope, v, None
        call = keywords(self._scores, q_nope, q.shape[-2])
        if has_codes:
            factors = torch.tensor(scales, dtype=torch.float32).to(q.device)
            call.update(k_descale=factors[:1] if qv is not None else factors[1:], v_descale=factors[1:])
        made, made_lse = flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=self._pages.lengths,
            block_table=self._pages.table,
            cu_seqlens_q=self._starts,
            max_seqlen_q=q.shape[0] if self._captures else self._longest,
            qv=qv,
            out=results.room(q_nope.shape, q_nope.dtype),
            return_softmax_lse=True,
            **call,
        )
        return results.of(made, made_lse)

    run_return_lse = functools.partialmethod(run, return_lse=True)


class MultiLevelCascadeAttentionWrapper:
    """Attention on keys in levels, such as prefixes that requests share, each on pages of its own."""

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Optional[Sequence[Tensor]] = None,
        paged_kv_indptr_buf_arr: Optional[Sequence[Tensor]] = None,
        paged_kv_indices_buf_arr: Optional[Sequence[Tensor]] = None,
        paged_kv_last_page_len_buf_arr: Optional[Sequence[Tensor]] = None,
    ) -> None:
        buffers = (
            qo_indptr_buf_arr,
            paged_kv_indptr_buf_arr,
            paged_kv_indices_buf_arr,
            paged_kv_last_page_len_buf_arr,
        )
        levels = count("num_levels", num_levels, 1)
        if use_cuda_graph and any(of_levels is None or len(of_levels) != levels for of_levels in buffers):
            raise InputError(f"use_cuda_graph without buffers of {levels} levels: give each for every level")
        self._captures = bool(use_cuda_graph)
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer,
                kv_layout,
                use_cuda_graph,
                *((of_levels[level] for of_levels in buffers) if use_cuda_graph else ()),
            )
            for level in range(levels)
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._captures

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffers: List) -> None:
        """Without effect: workspaces are not needed."""

    def plan(
        self,
        qo_indptr_arr: Sequence[Tensor],
        paged_kv_indptr_arr: Sequence[Tensor],
        paged_kv_indices_arr: Sequence[Tensor],
        paged_kv_last_page_len: Sequence[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: Optional[float] = None,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        q_data_type: Union[str, torch.dtype] = "float16",
        kv_data_type: Optional[Union[str, torch.dtype]] = None,
    ) -> None:
        """Sets the pages of every level; `causal` is of the last."""
        arrays = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        if any(len(array) != len(self._levels) for array in arrays):
            raise InputError(f"the wrapper has {len(self._levels)} levels: give arrays for each")
        for level, (wrapper, *given) in enumerate(zip(self._levels, *arrays)):
            wrapper.plan(
                *given,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and level == len(self._levels) - 1,
                pos_encoding_mode=pos_encoding_mode,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )

    begin_forward = plan

    def run(self, q: Tensor, paged_kv_cache: Cache) -> Tensor:
        """out (queries, heads_q, head_dim)."""
        parts = [level.run(q, paged_kv_cache, return_lse=True) for level in self._levels]
        outs, lses = zip(*parts)
        return merge_states(torch.stack(outs, 1), torch.stack(lses, 1))[0]

    forward = run


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
