"""FlashInfer's wrapper for decoding on paged caches."""

from __future__ import annotations

import functools
from typing import Any, Optional, Tuple, Union

import torch

from ._checks import count
from ._core import InputError, UnsupportedError
from ._flashinfer import Results, caches_of, page_lengths, pages_of, refuse, scores_of, starts_of
from ._flashinfer_plans import PagedPlan, is_undivided

Tensor = torch.Tensor
Cache = Union[Tensor, Tuple[Tensor, Tensor]]


class BatchDecodeWithPagedKVCacheWrapper(PagedPlan):
    """Decoding of one token of each request, or as many of each, on a paged cache."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Optional[Tensor] = None,
        paged_kv_indices_buffer: Optional[Tensor] = None,
        paged_kv_last_page_len_buffer: Optional[Tensor] = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers, jit_args)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        q_data_type: Optional[Union[str, torch.dtype]] = "float16",
        kv_data_type: Optional[Union[str, torch.dtype]] = None,
        o_data_type: Optional[Union[str, torch.dtype]] = None,
        data_type: Optional[Union[str, torch.dtype]] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        non_blocking: bool = True,
        block_tables: Optional[Tensor] = None,
        seq_lens: Optional[Tensor] = None,
        fixed_split_size: Optional[int] = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
    ) -> None:
        """Sets the pages, lengths and scores of the runs that follow. Request i has the pages that `indices`
        names from `indptr[i]` on, the last with `last_page_len[i]` keys. `q_len_per_req`: tokens of each
        request, which see the keys before them. `data_type`: that of the cache, and q's by default."""
        if window_right != 0:
            raise UnsupportedError(f"window_right is {window_right}: it must be 0")
        self._rows = count("q_len_per_req", q_len_per_req, 1)
        scores = scores_of(
            self._rows > 1, window_left, logits_soft_cap, sm_scale, pos_encoding_mode, rope_scale, rope_theta
        )
        host = starts_of("indptr", indptr, pages_of("indices", indices).shape[0])
        page_size = count("page_size", page_size, 1)
        lengths = page_lengths(host, "last_page_len", last_page_len, page_size)
        self._pages.plan(host, indices, lengths, page_size, (indptr, indices, last_page_len))
        undivided = is_undivided(disable_split_kv, fixed_split_size)
        if data_type is not None:
            kv_data_type = data_type if kv_data_type is None else kv_data_type
            q_data_type = data_type if q_data_type in (None, "float16") else q_data_type
        types = (q_data_type, kv_data_type, o_data_type)
        self._set(scores, (num_qo_heads, num_kv_heads), head_dim, types, undivided)

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
        q_len_per_req: Optional[int] = None,
        skip_softmax_threshold_scale_factor: None = None,
        kv_cache_sf: None = None,
    ) -> Any:
        """out (requests, heads_q, head_dim), with `return_lse` (out, lse); q (requests, heads_q, head_dim),
        with several tokens of each request one after another, `q_len_per_req` or as many as planned."""
        refuse(
            kv_cache_sf=kv_cache_sf, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor
        )
        k, v = caches_of(paged_kv_cache, self._layout)
        self._check(q, k)
        rows = self._rows if q_len_per_req is None else count("q_len_per_req", q_len_per_req, 1)
        if rows > 1 and not self._scores.causal:
            self._scores = self._scores._replace(causal=True)
        batch = self._pages.lengths.shape[0]
        if q.shape[0] != batch * rows:
            raise InputError(f"q has {q.shape[0]} rows: the plan is of {batch} requests with {rows} each")
        results = Results(self._types[2], v_scale, out, lse, return_lse)
        q = q.unsqueeze(1) if rows == 1 else q.unflatten(0, (batch, rows))
        scales = (q_scale, k_scale)
        return self._attention(q, k, v, None, rows, results, window_left, scales, sinks, args)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        pos_encoding_mode: str = "NONE",
        q_scale: Optional[float] = None,
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
        self._old(None, (window_left, logits_soft_cap, sm_scale, pos_encoding_mode, rope_scale, rope_theta))
        scales = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        return self.run(q, paged_kv_cache, return_lse=return_lse, **scales)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` whose calls are captured."""

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        buffers = (indptr_buffer, indices_buffer, last_page_len_buffer)
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, *buffers)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: Optional[float] = None,
    q_data_type: Optional[Union[str, torch.dtype]] = None,
    kv_data_type: Optional[Union[str, torch.dtype]] = None,
    data_type: Optional[Union[str, torch.dtype]] = None,
    sm_scale: Optional[float] = None,
    rope_scale: Optional[float] = None,
    rope_theta: Optional[float] = None,
    non_blocking: bool = True,
    fixed_split_size: Optional[int] = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Optional[Tensor] = None,
) -> None:
    """The wrapper's `plan`, whatever the wrapper has by that name. `global_override_indptr_cpu`: `indptr` on
    the host, which is then not copied."""
    BatchDecodeWithPagedKVCacheWrapper.plan(
        self,
        indptr if global_override_indptr_cpu is None else global_override_indptr_cpu,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode,
        window_left,
        logits_soft_cap,
        q_data_type,
        kv_data_type,
        data_type=data_type,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )
