"""FlashInfer's latents (MLA) on a paged cache: its wrapper, and its functions on tables and lengths."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any, Optional, Union

import torch

from ._checks import count, flag, number, one_of
from ._core import InputError, UnsupportedError
from ._flashinfer import (
    LOG2_E,
    Results,
    check_buffer,
    dtype_of,
    int32_of,
    keywords,
    refuse,
    scores_of,
    with_page,
)
from ._flashinfer_plans import PagedPlan, on_pages
from ._modifications import keys_of_rank
from .flash_mla import flash_mla_with_kvcache
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
        o_scale: Optional[float] = None,
        *,
        ckv_scale: Optional[float] = None,
        ckv_scale_arr: None = None,
        kpe_scale: Optional[float] = None,
    ) -> Any:
        """out (queries, heads, latents), with `return_lse` (out, lse), in base e with `return_lse_base_on_e`.
        q_nope (queries, heads, latents), q_pe (queries, heads, rotary columns), ckv_cache (pages, page,
        latents), kpe_cache (pages, page, rotary columns); caches of float8_e4m3fn, or float8_e5m2, are
        multiplied by `ckv_scale` and `kpe_scale`.

        With `kv_len` and `page_table` (requests, pages), and without a plan, requests of one token each have
        so many keys on these pages, and the scale is 192 ** -0.5, as of FlashInfer's 'cutlass'. `o_scale`:
        the result is divided by it, for an `out` of codes."""
        refuse(profiler_buffer=profiler_buffer, ckv_scale_arr=ckv_scale_arr)
        factor = None
        if o_scale is not None:
            if out is None or out.dtype.itemsize != 1:
                raise InputError("o_scale belongs to a result in codes: give out of float8_e4m3fn")
            factor = 1.0 / number("o_scale", o_scale)
        if self._scores is None and (kv_len is not None or page_table is not None):
            if kv_len is None or page_table is None:
                raise InputError("kv_len and page_table belong together: give both, or plan()")
            base = 1.0 if return_lse_base_on_e else LOG2_E
            dtype = q_nope.dtype if out is None else out.dtype
            results = Results(dtype, factor, out, lse, return_lse, base)
            q = torch.cat((q_nope, q_pe), -1)
            pages = (page_table, kv_len)
            caches = (ckv_cache, kpe_cache)
            return _on_latents(q.unsqueeze(1), caches, q_nope.shape[-1], *pages, 192**-0.5, None, results)
        if kv_len is not None or page_table is not None:
            raise InputError("kv_len and page_table after plan(): the plan has them, leave them out")
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
        dtype = self._types[2] if factor is None else out.dtype
        results = Results(dtype, factor, out, lse, return_lse, base)
        k, v = with_page(k), with_page(v)
        q, qv = q_pe, q_nope
        if not k.shape[-1]:
            q, k, qv = q_nope, v, None
        call = keywords(self._scores, q_nope)
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


Factor = Union[float, Tensor]


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Optional[Tensor],
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Optional[Tensor] = None,
    bmm1_scale: Factor = 1.0,
    bmm2_scale: Factor = 1.0,
    sinks: Any = None,
    skip_softmax_threshold_scale_factor: None = None,
    enable_pdl: Optional[bool] = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Optional[Tensor] = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Optional[Tensor] = None,
    max_q_len: Optional[int] = None,
    multi_ctas_kv_counter_buffer: Optional[Tensor] = None,
    sparse_mla_top_k_lens: Optional[Tensor] = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Optional[Tensor] = None,
    use_fp16_softmax: Optional[bool] = None,
) -> Any:
    """Attention of new tokens, `query` (requests, tokens, heads, columns) or with `cum_seq_lens_q` (all
    tokens, heads, columns), on latents: rows of `kv_lora_rank` + `qk_rope_head_dim` columns, the first of
    which are the values, in pages (pages, page, columns), or (pages, 1, page, columns). Tokens see the keys
    before them and themselves. The result has q's type, bfloat16 beside codes; lse (all tokens, heads), in base 2.

    With `sparse_mla_top_k` the rows that each token sees are named by `block_tables` (requests, tokens,
    top_k), or (all tokens, top_k), as page * page size + place, -1 for none; of these it sees as many as
    `seq_lens` has keys for it, or says for each token, and `sparse_mla_top_k_lens`. kv_cache may then be of
    bytes, rows of 656 (`kv_scale_format` says how their scales were found, and changes nothing).

    `enable_dcp`: the cache has the keys of the whole whose place modulo `cp_world` is `cp_rank`;
    `causal_seqlens_kv_global` (requests,): keys of the whole. Parts are merged by their lse."""
    refuse(
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        use_fp16_softmax=use_fp16_softmax,
    )
    if not uses_shared_paged_kv_idx:
        raise UnsupportedError("uses_shared_paged_kv_idx=False: keys and values are one row, give one table")
    columns = kv_lora_rank + qk_rope_head_dim
    packed = cum_seq_lens_q is not None
    if query.dim() != (3 if packed else 4) or query.shape[-1] != columns:
        need = f"(all tokens, heads, {columns})" if packed else f"(requests, tokens, heads, {columns})"
        raise InputError(f"query has the shape {tuple(query.shape)}: it must be {need}")
    cache = kv_cache.squeeze(1) if kv_cache.dim() == 4 and kv_cache.shape[1] == 1 else kv_cache
    if cache.dim() != 3:
        raise InputError(f"kv_cache has the shape {tuple(kv_cache.shape)}: it must be (pages, page, columns)")
    if sinks is not None and isinstance(sinks, (tuple, list)):
        (sinks,) = sinks
    q, shape = query, (*query.shape[:-1], kv_lora_rank)
    dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    tokens = math.prod(query.shape[:-2])
    # Rows of the result are packed, whatever the shapes of the caller's.
    room = None if out is None else out.view(tokens, *shape[-2:])
    of_lse = None if lse is None else lse.view(tokens, shape[-2])
    results = Results(
        dtype_of(None, dtype if out is None else out.dtype),
        None,
        room,
        of_lse,
        flag("return_lse", return_lse),
    )
    if isinstance(bmm1_scale, Tensor):
        # One number is of the rows as keys and as values.
        q, scale = (q.float() * bmm1_scale.float()).to(dtype), 1.0
    else:
        scale = number("bmm1_scale", bmm1_scale)
    results = results._replace(factor=bmm2_scale)
    if sparse_mla_top_k:
        if enable_dcp:
            raise UnsupportedError("enable_dcp with sparse_mla_top_k: leave one of them out")
        made = _on_named_rows(
            q,
            cache,
            kv_lora_rank,
            block_tables,
            seq_lens,
            sparse_mla_top_k_lens,
            scale,
            sinks,
            results,
            cum_seq_lens_q,
        )
    else:
        if sparse_mla_top_k_lens is not None:
            raise InputError("sparse_mla_top_k_lens without sparse_mla_top_k: it belongs to it, leave it out")
        if seq_lens is None:
            raise InputError("seq_lens is None: give the keys of each request")
        mask = None
        if flag("enable_dcp", enable_dcp):
            if causal_seqlens_kv_global is None:
                raise InputError("enable_dcp without causal_seqlens_kv_global: give keys of the whole")
            mask = keys_of_rank(int32_of(causal_seqlens_kv_global), cp_world, cp_rank)
        longest = query.shape[0] if max_q_len is None else count("max_q_len", max_q_len)
        longest = longest if packed else query.shape[1]
        made = _on_latents(
            q,
            cache,
            kv_lora_rank,
            block_tables,
            seq_lens,
            scale,
            sinks,
            results,
            cum_seq_lens_q,
            longest,
            mask,
        )
    if not return_lse:
        return out if out is not None else made.view(shape)
    return (out if out is not None else made[0].view(shape)), (lse if lse is not None else made[1])


def _on_latents(q, cache, rank, table, lengths, scale, sinks, results, starts=None, longest=1, mask=None):
    """Attention on pages of latents, of one cache or of two: latents and rotary columns."""
    parts = cache if isinstance(cache, tuple) else (cache[..., :rank], cache[..., rank:])
    v, k = (with_page(x).unsqueeze(-2) for x in parts)
    call = dict(
        softmax_scale=scale,
        causal=mask is None,
        sinks=None if sinks is None else sinks.reshape(-1),
        return_softmax_lse=results.wants_lse or results.lse is not None,
        mask_mod=mask,
    )
    if q.dtype.itemsize == 1:
        # Their values, which meet codes or numbers.
        q = q.to(torch.bfloat16)
    q, call["qv"] = q[..., rank:], q[..., :rank]
    if not k.shape[-1]:
        q, k = call.pop("qv"), v
    starts = None if starts is None else int32_of(starts)
    pages = SimpleNamespace(table=int32_of(table), lengths=int32_of(lengths))
    if call["mask_mod"] is None:
        del call["mask_mod"]
    return on_pages(q, k, v, pages, starts, longest, results, call)


def _on_named_rows(q, cache, rank, indices, lengths, of_top, scale, sinks, results, starts):
    """Attention of tokens on the rows that each names."""
    tokens = math.prod(q.shape[:-2])
    indices = indices.reshape(tokens, 1, indices.shape[-1])
    top = None if of_top is None else int32_of(of_top).reshape(-1)
    if lengths is not None:
        lengths = _keys_of_tokens(q, lengths, starts)
        lengths = lengths.clamp(0, indices.shape[-1]).to(torch.int32)
        top = lengths if top is None else torch.minimum(top, lengths)
    if sinks is not None and (results.wants_lse or results.lse is not None):
        raise UnsupportedError("sinks with lse of named rows: leave one of them out")
    made, lse = flash_mla_with_kvcache(
        q.reshape(tokens, 1, *q.shape[-2:]),
        cache.unsqueeze(2),
        None,
        None,
        rank,
        softmax_scale=scale,
        is_fp8_kvcache=cache.dtype.itemsize == 1,
        indices=indices,
        topk_length=top,
        attn_sink=None if sinks is None else sinks.reshape(-1).float(),
    )
    lse = lse.squeeze(-1)
    # A row that sees no key has +inf there.
    return results.of(made.squeeze(1), lse.masked_fill(lse == torch.inf, -torch.inf).transpose(0, 1))


def _keys_of_tokens(q, lengths, starts):
    """How many keys each token has, itself the last; `lengths` of the requests, or of the tokens."""
    tokens, lengths = math.prod(q.shape[:-2]), int32_of(lengths).reshape(-1)
    if starts is not None and lengths.shape[0] != tokens:
        starts = int32_of(starts)
        at = torch.arange(tokens, device=q.device)
        of = torch.searchsorted(starts[1:].contiguous(), at, right=True).clamp(max=lengths.shape[0] - 1)
        lengths = lengths[of] - (starts[1:][of] - 1 - at)
    elif lengths.shape[0] == q.shape[0] != tokens:
        # Of a request's tokens the last sees all of its keys.
        behind = torch.arange(1 - q.shape[1], 1, device=q.device)
        lengths = (lengths[:, None] + behind).reshape(-1)
    if lengths.shape[0] != tokens:
        raise InputError(f"seq_lens has {lengths.shape[0]} elements: one for each request or each token")
    return lengths


# Columns of DeepSeek-V4's combined tables that name rows of the window.
_WINDOW = 128


def trtllm_batch_decode_sparse_mla_dsv4(
    query: Tensor,
    swa_kv_cache: Tensor,
    workspace_buffer: Tensor,
    sparse_indices: Optional[Tensor] = None,
    compressed_kv_cache: Optional[Tensor] = None,
    sparse_topk_lens: Optional[Tensor] = None,
    seq_lens: Optional[Tensor] = None,
    out: Optional[Tensor] = None,
    bmm1_scale: Factor = 1.0,
    bmm2_scale: Factor = 1.0,
    sinks: Optional[Tensor] = None,
    kv_layout: str = "HND",
    cum_seq_lens_q: Optional[Tensor] = None,
    max_q_len: Optional[int] = None,
    enable_pdl: Optional[bool] = None,
    swa_topk_lens: Optional[Tensor] = None,
    extra_sparse_indices: Optional[Tensor] = None,
    extra_sparse_topk_lens: Optional[Tensor] = None,
    backend: str = "auto",
    hca_swa_indices: Optional[Tensor] = None,
    hca_compressed_block_tables: Optional[Tensor] = None,
    hca_seq_lens: Optional[Tensor] = None,
    hca_is_causal: bool = True,
    hca_use_persistent: bool = False,
    hca_sparse_indices_format: Optional[str] = None,
) -> Tensor:
    """Attention of DeepSeek-V4's tokens, `query` (requests, tokens, heads, columns) or with `cum_seq_lens_q`
    (all tokens, heads, columns), on the rows that each names in a cache of its window and one of compressed
    keys: pages (pages, page, columns), (pages, 1, page, columns), or by `kv_layout` "NHD" (pages, page, 1,
    columns). A row is key and value; caches have q's type, are codes or rows of 584 bytes. The result has q's
    type, bfloat16 for q of codes.

    `sparse_indices` (all tokens, 128 + topk), page * page size + place, -1 for none: rows of the window, of
    which a token sees as many as it has keys by `seq_lens`, then compressed ones, of which it sees
    `sparse_topk_lens` (all tokens,) less 128. Without these lengths all are of the window, as many as
    `swa_topk_lens` says, and `extra_sparse_indices` with `extra_sparse_topk_lens` name compressed ones."""
    refuse(
        hca_swa_indices=hca_swa_indices,
        hca_compressed_block_tables=hca_compressed_block_tables,
        hca_seq_lens=hca_seq_lens,
        hca_sparse_indices_format=hca_sparse_indices_format,
    )
    packed = cum_seq_lens_q is not None
    if query.dim() != (3 if packed else 4):
        need = "(all tokens, heads, columns)" if packed else "(requests, tokens, heads, columns)"
        raise InputError(f"query has the shape {tuple(query.shape)}: it must be {need}")
    if sparse_indices is None:
        raise InputError("sparse_indices is None: give the rows that each token sees")
    tokens, columns = math.prod(query.shape[:-2]), query.shape[-1]
    own, more = sparse_indices.reshape(tokens, 1, sparse_indices.shape[-1]), extra_sparse_indices
    own_lengths, more_lengths = swa_topk_lens, extra_sparse_topk_lens
    if sparse_topk_lens is not None:
        if not (swa_topk_lens is extra_sparse_indices is extra_sparse_topk_lens is None):
            raise InputError("sparse_topk_lens is of sparse_indices that name all rows: leave the others out")
        if seq_lens is None or own.shape[-1] < _WINDOW:
            raise InputError(f"sparse_topk_lens: give seq_lens too, and {_WINDOW} or more columns of indices")
        own_lengths = _keys_of_tokens(query, seq_lens, cum_seq_lens_q).clamp(0, _WINDOW)
        own, more = own[..., :_WINDOW], own[..., _WINDOW:]
        more_lengths = (int32_of(sparse_topk_lens) - _WINDOW).clamp(min=0)
    further = {}
    if more is not None and more.shape[-1]:
        if compressed_kv_cache is None:
            raise InputError("compressed_kv_cache is None: give the rows that the indices name")
        further = dict(
            extra_k_cache=_rows_in_pages("compressed_kv_cache", compressed_kv_cache, kv_layout),
            extra_indices_in_kvcache=more.reshape(tokens, 1, more.shape[-1]).contiguous(),
            extra_topk_length=None if more_lengths is None else int32_of(more_lengths).reshape(-1),
        )
    q, dtype = query, torch.bfloat16 if query.dtype.itemsize == 1 else query.dtype
    if isinstance(bmm1_scale, Tensor):
        q, scale = (q.float() * bmm1_scale.float()).to(dtype), 1.0
    else:
        scale = number("bmm1_scale", bmm1_scale)
    made, _ = flash_mla_with_kvcache(
        q.reshape(tokens, 1, *q.shape[-2:]),
        _rows_in_pages("swa_kv_cache", swa_kv_cache, kv_layout),
        None,
        None,
        columns,
        softmax_scale=scale,
        is_fp8_kvcache=swa_kv_cache.dtype.itemsize == 1,
        indices=own.contiguous(),
        topk_length=None if own_lengths is None else int32_of(own_lengths).reshape(-1),
        attn_sink=None if sinks is None else sinks.reshape(-1).float(),
        **further,
    )
    room = None if out is None else out.view(tokens, *query.shape[-2:])
    made = Results(dtype_of(None, dtype if out is None else out.dtype), bmm2_scale, room).of(made.squeeze(1))
    return out if out is not None else made.view(query.shape)


def _rows_in_pages(name, cache, layout):
    """A cache as (pages, page, 1, columns), where it lies."""
    one_of("kv_layout", layout, ("HND", "NHD"))
    axis = 1 if layout == "HND" else 2
    if cache.dim() == 3 and layout == "HND":
        return cache.unsqueeze(2)
    if cache.dim() != 4 or cache.shape[axis] != 1:
        need = "(pages, 1, page, columns)" if layout == "HND" else "(pages, page, 1, columns)"
        raise InputError(f"{name} has the shape {tuple(cache.shape)}: it must be {need}")
    return cache.squeeze(axis).unsqueeze(2)


def xqa_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    out: Optional[Tensor] = None,
    bmm1_scale: Factor = 1.0,
    bmm2_scale: Factor = 1.0,
    sinks: Any = None,
    enable_pdl: Optional[bool] = None,
) -> Tensor:
    """`trtllm_batch_decode_with_kv_cache_mla` of requests whose keys all tokens see up to their own."""
    sizes = (qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim)
    scales = dict(out=out, bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale, sinks=sinks)
    return trtllm_batch_decode_with_kv_cache_mla(
        query, kv_cache, workspace_buffer, *sizes, block_tables, seq_lens, max_seq_len, **scales
    )


def xqa_mla(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    workspace_buffer: Tensor,
    semaphores: Tensor,
    page_size: int,
    q_scale: Factor = 1.0,
    kv_scale: Factor = 1.0,
    sm_count: Optional[int] = None,
    enable_pdl: Optional[bool] = None,
) -> None:
    """Attention of q (requests, 1, heads, columns) on latents, written to `output` (.., latents): scores are
    multiplied by `q_scale` and `kv_scale`, the result by `kv_scale`. k_cache and v_cache: the same rows
    (rows, columns), or (pages, page, 1, columns)."""
    if v_cache.data_ptr() != k_cache.data_ptr():
        raise UnsupportedError("v_cache apart from k_cache: values are the first columns of the keys' rows")
    rank = output.shape[-1]
    made = trtllm_batch_decode_with_kv_cache_mla(
        q,
        k_cache.reshape(-1, page_size, q.shape[-1]),
        workspace_buffer,
        0,
        rank,
        q.shape[-1] - rank,
        page_table,
        seq_lens.reshape(-1),
        page_table.shape[-1] * page_size,
        bmm1_scale=q_scale * kv_scale,
        bmm2_scale=kv_scale,
    )
    output.copy_(made.view(output.shape))
