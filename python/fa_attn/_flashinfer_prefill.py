"""FlashInfer's wrappers for prefill, packed and on paged caches, and for batches of both kinds."""

from __future__ import annotations

import functools
from typing import Any, Optional, Tuple, Union

import torch

from ._checks import count, number
from ._core import InputError
from ._flashinfer import (
    Results,
    by_rows,
    caches_of,
    check_buffer,
    keywords,
    page_lengths,
    pages_of,
    places_of,
    refuse,
    rotated,
    scores_of,
    starts_of,
)
from ._flashinfer_plans import PagedPlan, Plan, is_undivided
from .interface import flash_attn_varlen_func

Tensor = torch.Tensor
Cache = Union[Tensor, Tuple[Tensor, Tensor]]


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
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        buffers = (paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers, jit_args)
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
        pages = pages_of("paged_kv_indices", paged_kv_indices)
        indptr = starts_of("paged_kv_indptr", paged_kv_indptr, pages.shape[0])
        if starts.shape != indptr.shape:
            raise InputError(
                f"qo_indptr has {starts.shape[0]} elements and paged_kv_indptr {indptr.shape[0]}: as many"
            )
        page_size = count("page_size", page_size, 1)
        lengths = page_lengths(indptr, "paged_kv_last_page_len", paged_kv_last_page_len, page_size)
        given = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._pages.plan(indptr, paged_kv_indices, lengths, page_size, given)
        self._set_starts(starts)
        rows = starts.diff()
        undivided = is_undivided(disable_split_kv, fixed_split_size)
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
        self._check_rows(q)
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
        if sm_scale is None:
            return super().run(q, paged_kv_cache, sinks=sinks, **options)
        with self._instead(scale=number("sm_scale", sm_scale)):
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
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, jit_args)
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
        undivided = is_undivided(disable_split_kv, fixed_split_size)
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
        q, descales = self._without_codes(q, args)
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
            q_scale=q_scale,
            k_scale=k_scale,
            descales=descales,
            mask=self._mask,
            program=self._program,
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
        self._set_lengths(qo_indptr, kv_indptr, kv_indices, kv_len_arr, page_size)
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
        self._check_rows(q)
        results = Results(self._types[2], v_scale, out, lse, True)
        cap = number("logits_soft_cap", logits_soft_cap) or self._scores.soft_cap
        with self._instead(soft_cap=cap):
            return self._attention(q, k, v, self._starts, self._longest, results, None, (None, k_scale))
