"""FlashInfer's wrappers that take a prefill and a batch of decodes in one call: here one after the other on
the stream, each with the kernel of its own."""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

import torch

from ._checks import flag, number
from ._core import UnsupportedError
from ._flashinfer import copy_of, left_of, refuse
from ._flashinfer_decode import BatchDecodeWithPagedKVCacheWrapper
from ._flashinfer_prefill import BatchPrefillWithPagedKVCacheWrapper
from ._flashinfer_single import single_prefill_with_kv_cache

Tensor = torch.Tensor
Cache = Union[Tensor, Tuple[Tensor, Tensor]]


class PODWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """A prefill of one request and decoding of a batch on a paged cache."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Optional[Tensor] = None,
        paged_kv_indices_buffer: Optional[Tensor] = None,
        paged_kv_last_page_len_buffer: Optional[Tensor] = None,
        jit_args: None = None,
    ) -> None:
        refuse(jit_args=jit_args)
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, True, *buffers)

    def plan(  # type: ignore[override]
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
        q_data_type: Optional[Union[str, torch.dtype]] = "float16",
        kv_data_type: Optional[Union[str, torch.dtype]] = None,
        data_type: Optional[Union[str, torch.dtype]] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        non_blocking: bool = True,
    ) -> None:
        """Sets the pages and lengths of the requests that are decoded; see
        `BatchDecodeWithPagedKVCacheWrapper.plan`."""
        super().plan(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            pos_encoding_mode,
            window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            data_type=data_type,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )

    begin_forward = plan

    def run(  # type: ignore[override]
        self,
        q_p: Tensor,
        k_p: Tensor,
        v_p: Tensor,
        q_d: Tensor,
        paged_kv_cache_d: Cache,
        custom_mask_p: Optional[Tensor] = None,
        packed_custom_mask_p: Optional[Tensor] = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: Optional[float] = None,
        window_left_p: int = -1,
        rope_scale_p: Optional[float] = None,
        rope_theta_p: Optional[float] = None,
        return_lse_p: bool = False,
        custom_mask_d: None = None,
        packed_custom_mask_d: None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: Optional[float] = None,
        window_left_d: int = -1,
        rope_scale_d: Optional[float] = None,
        rope_theta_d: Optional[float] = None,
        q_scale: Optional[float] = None,
        k_scale: Optional[float] = None,
        v_scale: Optional[float] = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: Optional[bool] = None,
    ) -> Any:
        """(out of the prefill, out of the decoding), with lse (out, lse) in its place. q_p, k_p and v_p: as
        of `single_prefill_with_kv_cache`; q_d and `paged_kv_cache_d`: as of a decode's run. The scores of the
        decoding are the plan's where they are not given here; factors are of the decoding."""
        refuse(custom_mask_d=custom_mask_d, packed_custom_mask_d=packed_custom_mask_d)
        # By its default FlashInfer means the wrapper's, too.
        if kv_layout_d != self._layout and kv_layout_d != "NHD":
            raise UnsupportedError(f"kv_layout_d is {kv_layout_d!r}: the wrapper is of {self._layout!r}")
        if (pos_encoding_mode_d, rope_scale_d, rope_theta_d) != ("NONE", None, None):
            raise UnsupportedError(
                "pos_encoding_mode_d and rope: the decoding's are of the plan, leave them out"
            )
        made_p = single_prefill_with_kv_cache(
            q_p,
            k_p,
            v_p,
            custom_mask=custom_mask_p,
            packed_custom_mask=packed_custom_mask_p,
            causal=causal_p,
            kv_layout=kv_layout_p,
            pos_encoding_mode=pos_encoding_mode_p,
            sm_scale=sm_scale_p,
            window_left=window_left_p,
            rope_scale=rope_scale_p,
            rope_theta=rope_theta_p,
            return_lse=flag("return_lse_p", return_lse_p),
        )
        given = {} if sm_scale_d is None else {"scale": number("sm_scale_d", sm_scale_d)}
        left = left_of(window_left_d)
        with self._instead(**given):
            made_d = super().run(
                q_d,
                paged_kv_cache_d,
                q_scale=q_scale,
                k_scale=k_scale,
                v_scale=v_scale,
                window_left=left if left >= 0 else None,
                return_lse=flag("return_lse_d", return_lse_d),
            )
        return made_p, made_d

    forward = run


class BatchPODWithPagedKVCacheWrapper:
    """A batch of prefills and a batch of decodes, each on pages."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._parts = [BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout) for _ in "pd"]
        self._layout = kv_layout

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return False

    def end_forward(self) -> None:
        """Without effect, as in FlashInfer."""

    def plan(
        self,
        qo_indptr_p: Tensor,
        kv_indptr_p: Tensor,
        kv_indices_p: Tensor,
        last_page_len_p: Tensor,
        qo_indptr_d: Tensor,
        kv_indptr_d: Tensor,
        kv_indices_d: Tensor,
        last_page_len_d: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: Optional[Union[str, torch.dtype]] = "float16",
        kv_data_type: Optional[Union[str, torch.dtype]] = None,
        data_type: Optional[Union[str, torch.dtype]] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        non_blocking: bool = True,
    ) -> None:
        """Sets rows, pages and lengths of both; see `BatchPrefillWithPagedKVCacheWrapper.plan`."""
        if data_type is not None:
            kv_data_type = data_type if kv_data_type is None else kv_data_type
            q_data_type = data_type if q_data_type in (None, "float16") else q_data_type
        of_prefill = (qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p)
        self._of_prefill = tuple(map(copy_of, of_prefill))
        self._sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._options = dict(
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        of_decode = (qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d)
        self._parts[1].plan(*of_decode, *self._sizes, **self._options)
        self._plan_prefill(False, {})

    def _plan_prefill(self, causal, mask):
        self._causal = None if mask else causal
        self._parts[0].plan(*self._of_prefill, *self._sizes, causal=causal, **mask, **self._options)

    def run(
        self,
        q_p: Tensor,
        paged_kv_cache_p: Cache,
        q_d: Tensor,
        paged_kv_cache_d: Cache,
        custom_mask_p: Optional[Tensor] = None,
        packed_custom_mask_p: Optional[Tensor] = None,
        causal_p: bool = False,
        q_scale: Optional[float] = None,
        k_scale: Optional[float] = None,
        v_scale: Optional[float] = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: Optional[bool] = None,
    ) -> Any:
        """(out of the prefills, out of the decodes), with `return_lse` ((out, out), (lse, lse)). Factors are
        of the decodes. A mask, and the first of calls with another `causal_p`, plans the prefills anew."""
        mask = {"custom_mask": custom_mask_p, "packed_custom_mask": packed_custom_mask_p}
        mask = {name: x for name, x in mask.items() if x is not None}
        causal = flag("causal_p", causal_p)
        if mask or self._causal is not causal:
            self._plan_prefill(causal, mask)
        prefill, decode = self._parts
        factors = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        made = [
            prefill.run(q_p, paged_kv_cache_p, return_lse=return_lse),
            decode.run(q_d, paged_kv_cache_d, return_lse=return_lse, **factors),
        ]
        return tuple(zip(*made)) if return_lse else tuple(made)
