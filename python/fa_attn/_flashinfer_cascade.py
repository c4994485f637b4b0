"""FlashInfer's wrapper for keys in levels."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple, Union

import torch

from ._checks import count
from ._core import InputError
from ._flashinfer_pages import merge_states
from ._flashinfer_prefill import BatchPrefillWithPagedKVCacheWrapper

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
