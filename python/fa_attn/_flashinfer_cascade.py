"""FlashInfer's wrappers for keys in levels, such as prefixes that requests share."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple, Union

import torch

from ._checks import count
from ._core import InputError
from ._flashinfer import copy_of
from ._flashinfer_decode import BatchDecodeWithPagedKVCacheWrapper
from ._flashinfer_pages import merge_state, merge_states
from ._flashinfer_prefill import BatchPrefillWithPagedKVCacheWrapper
from ._flashinfer_single import single_prefill_with_kv_cache

Tensor = torch.Tensor
Cache = Union[Tensor, Tuple[Tensor, Tensor]]


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


class _SharedPrefix:
    """A prefix that all requests share, (keys, heads_kv, head_dim), before the pages of each."""

    _Wrapper: Any = None

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._own = self._Wrapper(float_workspace_buffer, kv_layout)
        self._layout = kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Any) -> None:
        """Without effect: workspaces are not needed."""

    def end_forward(self) -> None:
        """Without effect, as in FlashInfer."""

    def _with_prefix(self, q, k, v, own, sm_scale=None):
        of_prefix = single_prefill_with_kv_cache(
            q, k, v, kv_layout=self._layout, sm_scale=sm_scale, return_lse=True
        )
        return merge_state(*of_prefix, *own)[0]


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Decoding of requests that share a prefix; `MultiLevelCascadeAttentionWrapper` takes its place."""

    _Wrapper = BatchDecodeWithPagedKVCacheWrapper

    def begin_forward(
        self,
        unique_kv_indptr: Tensor,
        unique_kv_indices: Tensor,
        unique_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: Union[str, torch.dtype] = "float16",
    ) -> None:
        """Sets the pages and lengths of each request behind the prefix."""
        pages = (unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len)
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._own.plan(*pages, *sizes, data_type=data_type)

    plan = begin_forward

    def forward(self, q: Tensor, k_shared: Tensor, v_shared: Tensor, unique_kv_cache: Cache) -> Tensor:
        """out (requests, heads_q, head_dim)."""
        own = self._own.run(q, unique_kv_cache, return_lse=True)
        return self._with_prefix(q, k_shared, v_shared, own)

    run = forward


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Prefill of requests that share a prefix; `MultiLevelCascadeAttentionWrapper` takes its place."""

    _Wrapper = BatchPrefillWithPagedKVCacheWrapper

    def begin_forward(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Sets the pages and lengths of each request behind the prefix; runs decide the types."""
        pages = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._planned = (*map(copy_of, pages), num_qo_heads, num_kv_heads, head_dim, page_size)
        self._of: Any = None

    plan = begin_forward

    def forward(
        self,
        q: Tensor,
        k_shared: Tensor,
        v_shared: Tensor,
        unique_kv_cache: Cache,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
    ) -> Tensor:
        """out (queries, heads_q, head_dim); `causal` is of the keys behind the prefix."""
        first = unique_kv_cache if isinstance(unique_kv_cache, torch.Tensor) else unique_kv_cache[0]
        of = (q.dtype, first.dtype, causal, sm_scale)
        if self._of != of:
            types = dict(q_data_type=q.dtype, kv_data_type=first.dtype)
            self._own.plan(*self._planned, causal=causal, sm_scale=sm_scale, **types)
            self._of = of
        own = self._own.run(q, unique_kv_cache, return_lse=True)
        return self._with_prefix(q, k_shared, v_shared, own, sm_scale)

    run = forward
