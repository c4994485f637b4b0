"""FlashInfer's wrapper for latents (MLA) on a paged cache."""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch

from ._core import InputError
from ._flashinfer import (
    LOG2_E,
    Results,
    check_buffer,
    keywords,
    refuse,
    scores_of,
    with_page,
)
from ._flashinfer_plans import PagedPlan
from .interface import flash_attn_with_kvcache

Tensor = torch.Tensor


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
        self._set_lengths(qo_indptr, kv_indptr, kv_indices, kv_len_arr, page_size)
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
        latents), kpe_cache (pages, page, rotary columns); caches of float8_e4m3fn, or float8_e5m2, are
        multiplied by `ckv_scale` and `kpe_scale`."""
        refuse(profiler_buffer=profiler_buffer, o_scale=o_scale, ckv_scale_arr=ckv_scale_arr)
        v, k = ckv_cache.unsqueeze(-2), kpe_cache.unsqueeze(-2)
        self._check(q_nope, v, ("q_nope", "ckv_cache"))
        for name, x, like in (("q_pe", q_pe, q_nope), ("kpe_cache", kpe_cache, ckv_cache)):
            if x.dtype != like.dtype:
                raise InputError(f"{name}.dtype is {x.dtype}: it must be {like.dtype}")
        scales, has_codes = (kpe_scale, ckv_scale), ckv_cache.dtype.itemsize == 1
        if any((scale is not None) != has_codes for scale in scales):
            need = "both belong to caches of codes" if has_codes else "leave them out"
            raise InputError(
                f"ckv_scale is {ckv_scale} and kpe_scale {kpe_scale} with caches of {ckv_cache.dtype}: {need}"
            )
        self._check_rows(q_nope, "q_nope")
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
