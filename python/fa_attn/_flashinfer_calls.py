"""FlashInfer's functions on page tables and lengths, by the names of the kernels that it has for them:
TensorRT-LLM's, XQA and cuDNN's. Nothing is read on the host, so that calls can be captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Optional, Tuple, Union

import torch

from ._checks import count, flag, number
from ._core import InputError, UnsupportedError
from ._flashinfer import (
    LOG2_E,
    Results,
    alibi,
    by_rows,
    caches_of,
    check_layout,
    dtype_of,
    int32_of,
    left_of,
    refuse,
    with_page,
)
from ._flashinfer_plans import on_pages
from ._programs import Program
from .interface import flash_attn_varlen_func

Tensor = torch.Tensor
Cache = Union[Tensor, Tuple[Tensor, Tensor]]
Factor = Union[float, Tensor]


def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Cache,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: Factor = 1.0,
    bmm2_scale: Factor = 1.0,
    window_left: int = -1,
    out: Optional[Tensor] = None,
    out_dtype: Optional[Union[torch.dtype, str]] = None,
    o_sf_scale: None = None,
    o_sf_vec_size: None = None,
    sinks: Any = None,
    kv_layout: str = "HND",
    enable_pdl: Optional[bool] = None,
    backend: str = "auto",
    q_len_per_req: Optional[int] = 1,
    o_scale: Optional[float] = 1.0,
    mask: Optional[Tensor] = None,
    max_q_len: Optional[int] = None,
    cum_seq_lens_q: Optional[Tensor] = None,
    skip_softmax_threshold_scale_factor: None = None,
    kv_cache_sf: None = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Optional[Tensor] = None,
    return_lse: bool = False,
    bmm1_scale_log2: Optional[Tensor] = None,
    multi_ctas_kv_counter_buffer: Optional[Tensor] = None,
    enable_block_sparse_attention: bool = False,
    bf16q_fp8kv_transform_mode: Optional[str] = None,
) -> Any:
    """Attention of a few new tokens of each request, `query` (tokens, heads_q, head_dim), on pages: each has
    `q_len_per_req`, or those from `cum_seq_lens_q[i]` on. They see the keys before them and themselves, or
    of the request's last tokens those whose bits `mask` has, uint16 (requests, tokens, 2 ceil(tokens / 32)),
    with `cum_seq_lens_q` (all tokens, ..).

    `kv_cache`: (pages, 2, heads_kv, page, head_dim) by default, one tensor of 1 instead of 2 where values are
    the keys, or (k_cache, v_cache). `block_tables` (requests, pages); without `uses_shared_paged_kv_idx`
    (requests, 2, pages), of K and of V, whose pages are then copied; with `enable_block_sparse_attention`
    (heads_kv, requests, pages), with `seq_lens` (heads_kv, requests). `bmm1_scale`: the scale of scores;
    `bmm2_scale`: a factor of the result."""
    refuse(
        o_sf_scale=o_sf_scale,
        o_sf_vec_size=o_sf_vec_size,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        kv_cache_sf=kv_cache_sf,
    )
    k, v = _caches(kv_cache, kv_layout)
    results = _results(query, out, out_dtype, lse, return_lse)
    starts, longest = _queries(query, q_len_per_req, cum_seq_lens_q, max_q_len)
    scores = _scores(bmm1_scale, bmm2_scale, v, bmm1_scale_log2)
    if flag("enable_block_sparse_attention", enable_block_sparse_attention):
        for name, is_given in (
            ("window_left", window_left >= 0),
            ("mask", mask is not None),
            ("cum_seq_lens_q", starts is not None),
            ("uses_shared_paged_kv_idx=False", not uses_shared_paged_kv_idx),
        ):
            if is_given:
                raise UnsupportedError(f"enable_block_sparse_attention with {name}: leave one of them out")
        return _of_heads(query, k, v, block_tables, seq_lens, longest, results, scores, sinks)
    k, v, pages = _pages(k, v, block_tables, seq_lens, uses_shared_paged_kv_idx)
    call = _call(scores, query, k, window_left, longest > 1, sinks, _draft(mask, longest, starts), results)
    q = query if starts is not None else _by_request(query, longest, pages)
    return on_pages(q, k, v, pages, starts, longest, results, call)


def trtllm_batch_context_with_kv_cache(
    query: Tensor,
    kv_cache: Cache,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Factor,
    bmm2_scale: Factor,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    window_left: int = -1,
    out: Optional[Tensor] = None,
    out_dtype: Optional[Union[torch.dtype, str]] = None,
    o_sf_scale: None = None,
    o_sf_vec_size: None = None,
    kv_layout: str = "HND",
    enable_pdl: Optional[bool] = None,
    sinks: Any = None,
    kv_cache_sf: None = None,
    skip_softmax_threshold_scale_factor: None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: Optional[Tensor] = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: Optional[Tensor] = None,
    use_fp16_softmax: Optional[bool] = None,
    uses_spcompress: Optional[bool] = None,
) -> Any:
    """Prefill of packed requests, `query` (tokens, heads_q, head_dim), on pages; see
    `trtllm_batch_decode_with_kv_cache`. `cum_seq_lens_kv` repeats `seq_lens` and is not read."""
    refuse(
        o_sf_scale=o_sf_scale,
        o_sf_vec_size=o_sf_vec_size,
        kv_cache_sf=kv_cache_sf,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        use_fp16_softmax=use_fp16_softmax,
        uses_spcompress=uses_spcompress,
    )
    k, v = _caches(kv_cache, kv_layout)
    results = _results(query, out, out_dtype, lse, return_lse)
    k, v, pages = _pages(k, v, block_tables, seq_lens, uses_shared_paged_kv_idx)
    _check_batch(batch_size, pages.lengths)
    longest = count("max_q_len", max_q_len)
    scores = _scores(bmm1_scale, bmm2_scale, v)
    call = _call(scores, query, k, window_left, causal, sinks, None, results)
    return on_pages(query, k, v, pages, int32_of(cum_seq_lens_q), longest, results, call)


def trtllm_ragged_attention_deepseek(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    workspace_buffer: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Factor,
    bmm2_scale: Factor,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    enable_pdl: Optional[bool],
    is_causal: bool,
    return_lse: bool,
    attention_sinks: Optional[Tensor] = None,
    skip_softmax_threshold_scale_factor: None = None,
    out: Optional[Tensor] = None,
    lse: Optional[Tensor] = None,
    sage_attn_sfs: Tuple[None, None, None, None] = (None, None, None, None),
    num_elts_per_sage_attn_blk: Tuple[int, int, int, int] = (0, 0, 0, 0),
    backend: str = "trtllm-gen",
    q_seq_lens_cpu: Optional[Tensor] = None,
    kv_seq_lens_cpu: Optional[Tensor] = None,
    use_fp16_softmax: Optional[bool] = None,
    uses_spcompress: Optional[bool] = None,
    skip_all_rows_active_check: bool = False,
) -> Any:
    """Attention of packed requests on packed keys, as prefill of MLA models computes it on heads: any head
    dims. `o_sf_scale` is of results in NVFP4, which there are none of; `seq_lens` and the lengths on the host
    repeat `cum_seq_lens_kv` and are not read. Of q in codes the result is bfloat16."""
    refuse(
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        sage_attn_sfs=any(x is not None for x in sage_attn_sfs) or None,
        use_fp16_softmax=use_fp16_softmax,
        uses_spcompress=uses_spcompress,
    )
    starts = (int32_of(cum_seq_lens_q), int32_of(cum_seq_lens_kv))
    _check_batch(batch_size, starts[0][1:])
    dtype = torch.bfloat16 if query.dtype.itemsize == 1 else query.dtype
    results = _results(query, out, dtype if out is None else None, lse, return_lse)
    scores = _scores(bmm1_scale, bmm2_scale, value)
    call = _call(scores, query, key, window_left, is_causal, attention_sinks, None, results)
    longest = (count("max_q_len", max_q_len), count("max_kv_len", max_kv_len))
    return _packed(query, key, value, starts, longest, results, call)


def trtllm_fmha_v2_prefill(
    qkv: Union[Tensor, Tuple[Tensor, ...]],
    input_layout: str,
    workspace_buffer: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    block_tables: Optional[Tensor] = None,
    out: Optional[Tensor] = None,
    out_dtype: Optional[Union[torch.dtype, str]] = None,
    sinks: Any = None,
    pos_encoding_mode: Optional[str] = None,
    logits_soft_cap_scale: Optional[float] = None,
    mask_mode: str = "causal",
    window_left: int = -1,
    chunked_attention_size: int = 0,
    save_softmax_stats: bool = False,
    skip_softmax_threshold_scale_factor: float = 0,
) -> Any:
    """Prefill of packed requests. `input_layout`: PACKED_QKV (tokens, 3, heads, head_dim), CONTIGUOUS_Q_KV
    (q and (tokens, 2, heads_kv, head_dim)), SEPARATE_Q_K_V, or Q_PAGED_KV_HND and Q_PAGED_KV_NHD with pages
    (pages, 2, ..) that `block_tables` (requests, pages) names. `mask_mode`: 'causal', 'padding',
    'sliding_window' with `window_left`, 'chunked' with `chunked_attention_size`."""
    refuse(save_softmax_stats=save_softmax_stats or None)
    refuse(skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor or None)
    mode = str(mask_mode).lower()
    if mode not in ("causal", "padding", "sliding_window", "chunked"):
        need = "'causal', 'padding', 'sliding_window' or 'chunked'"
        raise InputError(f"mask_mode is {mask_mode!r}: it must be {need}")
    encoding = None if pos_encoding_mode is None else str(pos_encoding_mode).upper()
    if encoding not in (None, "NONE", "ALIBI"):
        raise InputError(f"pos_encoding_mode is {pos_encoding_mode!r}: it must be None or 'alibi'")
    is_windowed, chunk = window_left is not None and window_left >= 0, chunked_attention_size or 0
    if mode == "padding" and (is_windowed or chunk):
        raise InputError("mask_mode is 'padding': windows and chunks belong to causal masks")
    if mode == "sliding_window" and not is_windowed:
        raise InputError("mask_mode is 'sliding_window' without window_left: give one of at least 0")
    if mode == "chunked" and not chunk:
        raise InputError("mask_mode is 'chunked' without chunked_attention_size: give one above 0")
    table = None
    if input_layout == "PACKED_QKV":
        q, k, v = qkv.unbind(1)
    elif input_layout == "CONTIGUOUS_Q_KV":
        q, (k, v) = qkv[0], qkv[1].unbind(1)
    elif input_layout == "SEPARATE_Q_K_V":
        q, k, v = qkv
    elif input_layout in ("Q_PAGED_KV_HND", "Q_PAGED_KV_NHD"):
        if isinstance(qkv[1], (tuple, list)):
            need = "give one tensor (pages, 2, ..) and a table (requests, pages)"
            raise UnsupportedError(f"{input_layout} of (k_cache, v_cache), by distances in memory: {need}")
        if block_tables is None:
            raise InputError(f"{input_layout} without block_tables: give a table (requests, pages)")
        q, table = qkv[0], block_tables
        k, v = _caches(qkv[1], input_layout[-3:])
    else:
        need = "PACKED_QKV, CONTIGUOUS_Q_KV, SEPARATE_Q_K_V, Q_PAGED_KV_HND or Q_PAGED_KV_NHD"
        raise InputError(f"input_layout is {input_layout!r}: it must be {need}")
    _check_batch(batch_size, seq_lens)
    results = _results(q, out, out_dtype, None, False)
    scores = _scores(bmm1_scale, bmm2_scale, v)
    left = window_left if is_windowed else -1
    call = _call(scores, q, k, left, mode != "padding", sinks, None, results)
    call["softcap"] = number("logits_soft_cap_scale", logits_soft_cap_scale) or 0.0
    if encoding == "ALIBI":
        call["score_mod"] = alibi(q)
    if chunk:
        call["attention_chunk"] = count("chunked_attention_size", chunk, 1)
    longest = count("max_q_len", max_q_len)
    if table is None:
        starts = (int32_of(cum_seq_lens_q), int32_of(cum_seq_lens_kv))
        return _packed(q, k, v, starts, (longest, count("max_kv_len", max_kv_len)), results, call)
    k, v, pages = _pages(k, v, table, seq_lens, True)
    return on_pages(q, k, v, pages, int32_of(cum_seq_lens_q), longest, results, call)


def xqa_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Cache,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: Factor = 1.0,
    bmm2_scale: Factor = 1.0,
    window_left: int = -1,
    out: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    kv_layout: str = "NHD",
    enable_pdl: Optional[bool] = None,
    q_len_per_req: Optional[int] = 1,
    o_scale: Optional[float] = 1.0,
    mask: Optional[Tensor] = None,
    kv_cache_sf: None = None,
    q_cu_seq_lens: Optional[Tensor] = None,
) -> Tensor:
    """`trtllm_batch_decode_with_kv_cache`, with rows before heads; with `q_cu_seq_lens` requests have up to
    `q_len_per_req` tokens."""
    longest = {"q_len_per_req": q_len_per_req}
    if q_cu_seq_lens is not None:
        longest = {"q_len_per_req": None, "max_q_len": q_len_per_req, "cum_seq_lens_q": q_cu_seq_lens}
    return trtllm_batch_decode_with_kv_cache(
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        max_seq_len,
        bmm1_scale,
        bmm2_scale,
        window_left,
        out,
        sinks=sinks,
        kv_layout=kv_layout,
        mask=mask,
        kv_cache_sf=kv_cache_sf,
        **longest,
    )


def xqa(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    workspace_buffer: Tensor,
    semaphores: Tensor,
    num_kv_heads: int,
    page_size: int,
    sinks: Optional[Tensor] = None,
    q_scale: Factor = 1.0,
    kv_scale: Factor = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: Optional[int] = None,
    enable_pdl: Optional[bool] = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: Optional[Tensor] = None,
    *,
    q_cu_seq_lens: Optional[Tensor] = None,
    k_sf_cache: None = None,
    v_sf_cache: None = None,
) -> None:
    """Attention of q (requests, 1, heads_q, head_dim), of several tokens (requests, 1, tokens, heads_q,
    head_dim) or with `q_cu_seq_lens` (all tokens, heads_q, head_dim), on pages, written to `output`. Scores
    are multiplied by `q_scale`, `kv_scale` and 1 / sqrt(head_dim), the result by `kv_scale` and
    `rcp_out_scale`; `mask` as in `trtllm_batch_decode_with_kv_cache`."""
    refuse(k_sf_cache=k_sf_cache, v_sf_cache=v_sf_cache)
    caches = tuple(by_rows(x, check_layout(kv_layout)) for x in (k_cache, v_cache))
    have = tuple(caches[0].shape[1:3])
    if have != (page_size, num_kv_heads):
        raise InputError(f"pages have {have} rows and heads: page_size and num_kv_heads say otherwise")
    if q_cu_seq_lens is None and q.shape[1] != 1:
        raise UnsupportedError(f"q has {q.shape[1]} beams: give one, others as requests of their own")
    rows = (-1, *q.shape[-2:])
    made = trtllm_batch_decode_with_kv_cache(
        q.reshape(rows),
        caches,
        workspace_buffer,
        page_table,
        seq_lens.reshape(-1),
        page_table.shape[-1] * page_size,
        q_scale * kv_scale * q.shape[-1] ** -0.5,
        kv_scale * rcp_out_scale,
        sliding_win_size - 1,
        out_dtype=output.dtype,
        sinks=sinks,
        kv_layout="NHD",
        mask=mask,
        q_len_per_req=q_seq_len if q_cu_seq_lens is None else None,
        max_q_len=None if q_cu_seq_lens is None else q_seq_len,
        cum_seq_lens_q=q_cu_seq_lens,
    )
    output.copy_(made.view(output.shape))


def cudnn_batch_decode_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    workspace_buffer: Tensor,
    *,
    max_sequence_kv: int,
    actual_seq_lens_kv: Optional[Tensor] = None,
    block_tables: Optional[Tensor] = None,
    is_cuda_graph_compatible: bool = False,
    batch_offsets_q: Optional[Tensor] = None,
    batch_offsets_o: Optional[Tensor] = None,
    batch_offsets_k: None = None,
    batch_offsets_v: None = None,
    out: Optional[Tensor] = None,
) -> Tensor:
    """Attention of a token of each request, q (requests, heads_q, head_dim), on caches (pages, heads_kv,
    page, head_dim). Offsets of q and of the result, in elements, must be those of one token after another,
    which is compared on the host: leave them out of captured calls."""
    refuse(batch_offsets_k=batch_offsets_k, batch_offsets_v=batch_offsets_v)
    if actual_seq_lens_kv is None or block_tables is None:
        raise InputError("actual_seq_lens_kv and block_tables are missing: give both")
    batch, width = q.shape[0], q.shape[1] * q.shape[2]
    for name, offsets, step in (
        ("batch_offsets_q", batch_offsets_q, width),
        ("batch_offsets_o", batch_offsets_o, q.shape[1] * v_cache.shape[-1]),
    ):
        if offsets is not None:
            _check_offsets(name, offsets, step * torch.arange(offsets.numel(), device=offsets.device))
    k, v = _caches((k_cache, v_cache), "HND")
    lengths = actual_seq_lens_kv.reshape(-1).to(q.device)
    k, v, pages = _pages(k, v, block_tables, lengths, True)
    _check_batch(batch, lengths)
    results = _results(q, out, None, None, False)
    call = _call(_scores(scale, 1.0, v), q, k, -1, False, None, None, results)
    return on_pages(q.unsqueeze(1), k, v, pages, None, 1, results, call)


def cudnn_batch_prefill_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    workspace_buffer: Tensor,
    *,
    max_token_per_sequence: int,
    max_sequence_kv: int,
    actual_seq_lens_q: Optional[Tensor] = None,
    actual_seq_lens_kv: Optional[Tensor] = None,
    block_tables: Optional[Tensor] = None,
    causal: bool,
    return_lse: bool,
    q_scale: Optional[Tensor] = None,
    k_scale: Optional[Tensor] = None,
    v_scale: Optional[Tensor] = None,
    batch_offsets_q: Optional[Tensor] = None,
    batch_offsets_o: Optional[Tensor] = None,
    batch_offsets_k: Optional[Tensor] = None,
    batch_offsets_v: Optional[Tensor] = None,
    batch_offsets_stats: None = None,
    batch_offsets_units: str = "elements",
    out: Optional[Tensor] = None,
    lse: Optional[Tensor] = None,
    is_cuda_graph_compatible: bool = False,
    backend: Optional[str] = None,
    o_data_type: Optional[torch.dtype] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """(out, lse) of packed requests q (tokens, heads_q, head_dim) on caches (pages, heads_kv, page, head_dim)
    that `block_tables` names, or on packed keys (keys, heads_kv, head_dim). Requests begin at
    `batch_offsets_q` and `batch_offsets_k`, in elements or tokens, or one behind the other; those of the
    result and of values must name the same rows, which is compared on the host unless they are the same
    tensor or none. lse (requests, max_token_per_sequence, heads_q), a natural logarithm, -inf behind a
    request's rows."""
    refuse(batch_offsets_stats=batch_offsets_stats)
    if batch_offsets_units not in ("elements", "tokens"):
        raise InputError(f"batch_offsets_units is {batch_offsets_units!r}: it must be 'elements' or 'tokens'")
    in_elements, is_paged = batch_offsets_units == "elements", block_tables is not None
    k, v = _caches((k_cache, v_cache), "HND") if is_paged else (k_cache, v_cache)

    def rows(offsets, x):
        return offsets.reshape(-1) // (x.shape[-2] * x.shape[-1] if in_elements else 1)

    used_q, used_k = (
        None if x is None else int32_of(x.reshape(-1).to(q.device))
        for x in (actual_seq_lens_q, actual_seq_lens_kv)
    )
    starts = rows(batch_offsets_q, q) if batch_offsets_q is not None else _starts(used_q, "q")
    o_width = SimpleNamespace(shape=(q.shape[-2], v.shape[-1]))
    if batch_offsets_o is not None and batch_offsets_o is not batch_offsets_q:
        _check_offsets("batch_offsets_o", rows(batch_offsets_o, o_width), starts)
    starts = int32_of(starts)
    results = _results(q, out, o_data_type, None, True)
    descales = {"q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale}
    given = {name: x.float().reshape(-1) for name, x in descales.items() if x is not None}
    call = _call((number("scale", scale), given, None), q, k, -1, causal, None, None, results)
    del call["factor"]
    call["seqused_q"] = used_q
    longest = count("max_token_per_sequence", max_token_per_sequence)
    if is_paged:
        if used_k is None:
            raise InputError("block_tables without actual_seq_lens_kv: give the keys of each request")
        for name, value in (("batch_offsets_k", batch_offsets_k), ("batch_offsets_v", batch_offsets_v)):
            if value is not None:
                raise InputError(f"{name} with block_tables: pages say where keys are, leave it out")
        k, v, pages = _pages(k, v, block_tables, used_k, True)
        call.update(block_table=pages.table, seqused_k=pages.lengths)
        most = pages.table.shape[1] * k.shape[1]
        made, natural = _varlen(q, k, v, (starts, None), (longest, most), results, call)
    else:
        starts_k = rows(batch_offsets_k, k) if batch_offsets_k is not None else _starts(used_k, "kv")
        if batch_offsets_v is not None and batch_offsets_v is not batch_offsets_k:
            _check_offsets("batch_offsets_v", rows(batch_offsets_v, v), starts_k)
        call["seqused_k"] = used_k
        bounds = (longest, count("max_sequence_kv", max_sequence_kv))
        made, natural = _varlen(q, k, v, (starts, int32_of(starts_k)), bounds, results, call)
    made, _ = results._replace(base=1.0).of(made, natural)
    if not return_lse:
        return made, None
    ends = starts[1:] if used_q is None else starts[:-1] + used_q
    at = starts[:-1, None] + torch.arange(longest, device=q.device)
    padded = natural.transpose(0, 1)[at.clamp(max=max(q.shape[0] - 1, 0))]
    padded = padded.masked_fill((at >= ends[:, None])[..., None], -torch.inf)
    return made, padded if lse is None else lse.copy_(padded)


def _check_offsets(name, offsets, need):
    """Refuses offsets that name other rows than the call reads."""
    if offsets.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"{name} in a captured call: give the same tensor as for q or k, with "
            "batch_offsets_units='tokens', or leave it out"
        )
    if offsets.shape != need.shape or not bool((offsets == need.to(offsets.device)).all()):
        raise UnsupportedError(f"{name} names other rows than q's or k's: rows of a request lie together")


def _starts(lengths, name):
    if lengths is None:
        raise InputError(f"actual_seq_lens_{name} and batch_offsets are missing: give one")
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _caches(cache, layout):
    """(k, v) of a cache; one tensor of (pages, 1, ..) is both."""
    check_layout(layout)
    if isinstance(cache, torch.Tensor) and cache.dim() == 5 and cache.shape[1] == 1:
        cache = (cache[:, 0], cache[:, 0])
    return caches_of(cache, layout)


def _results(q, out, dtype, lse, wants_lse):
    """What a call writes: of the type that it names, of `out`, or of q."""
    if dtype == "nvfp4" or (out is not None and not isinstance(out, torch.Tensor)):
        raise UnsupportedError("results in NVFP4: give out, or out_dtype, of 16 bits or float8_e4m3fn")
    named = dtype_of(dtype, q.dtype if out is None else out.dtype)
    return Results(named, None, out, lse, flag("return_lse", wants_lse))


def _scores(bmm1, bmm2, v, bmm1_log2=None):
    """(scale, descales, factor): what scores and the result are multiplied by."""
    descales, factor = {}, bmm2
    if bmm1_log2 is not None:
        bmm1 = bmm1_log2.float() / LOG2_E
    scale = number("bmm1_scale", 1.0 if isinstance(bmm1, torch.Tensor) else bmm1)
    if isinstance(bmm1, torch.Tensor):
        descales["k_descale"] = bmm1.float().reshape(-1)
    if v.dtype.itemsize == 1:
        if not isinstance(bmm2, torch.Tensor) and bmm2 != 1:
            bmm2 = torch.full((1,), float(bmm2), dtype=torch.float32, device=v.device)
        if isinstance(bmm2, torch.Tensor):
            descales["v_descale"], factor = bmm2.float().reshape(-1), None
    return scale, descales, factor


def _call(scores, q, k, window_left, causal, sinks, mask, results):
    """The keyword arguments of a call."""
    scale, descales, factor = scores
    if isinstance(sinks, (tuple, list)):
        if len(sinks) != 1:
            raise InputError(f"sinks has {len(sinks)} tensors: give one, (heads_q,)")
        (sinks,) = sinks
    call = dict(
        descales,
        softmax_scale=scale,
        causal=flag("causal", causal) and mask is None,
        window_size=(left_of(window_left), -1),
        sinks=None if sinks is None else sinks.reshape(-1),
        return_softmax_lse=results.wants_lse or results.lse is not None,
        factor=factor,
    )
    if mask is not None:
        call["mask_mod"] = mask
    return call


def _varlen(q, k, v, starts, longest, results, call):
    call = dict(call)
    return flash_attn_varlen_func(
        q, k, v, *starts, *longest, out=results.room((*q.shape[:-1], v.shape[-1]), q.dtype), **call
    )


def _packed(q, k, v, starts, longest, results, call):
    """Attention of packed rows on packed keys."""
    call = dict(call)
    results = results._replace(factor=call.pop("factor"))
    made = _varlen(q, k, v, starts, longest, results, call)
    return results.of(*made) if call["return_softmax_lse"] else results.of(made)


def _check_batch(batch, lengths):
    if lengths.shape[0] != batch:
        raise InputError(f"batch_size is {batch}: there are {lengths.shape[0]} lengths")


def _queries(q, rows, starts, longest):
    """(starts, the most tokens of a request): starts are None where requests have as many tokens."""
    if starts is None:
        return None, count("q_len_per_req", 1 if rows is None else rows, 1)
    if rows not in (None, 1):
        raise InputError(f"q_len_per_req is {rows} with cum_seq_lens_q: give None and max_q_len")
    return int32_of(starts), q.shape[0] if longest is None else count("max_q_len", longest)


def _by_request(q, rows, pages):
    batch = pages.lengths.shape[0]
    if q.shape[0] != batch * rows:
        raise InputError(f"query has {q.shape[0]} rows: {batch} requests have {rows} each")
    return q.unflatten(0, (batch, rows))


def _pages(k, v, table, lengths, is_shared):
    """(k, v, table and lengths) of requests."""
    k, v, table = with_page(k), with_page(v), int32_of(table)
    if not is_shared:
        if table.dim() != 3 or table.shape[1] != 2:
            have = tuple(table.shape)
            raise InputError(f"block_tables has the shape {have}: tables of K and V are (requests, 2, pages)")
        # What lies behind a request's pages may be anything.
        of_k, of_v = (x.reshape(-1).long().clamp(0, k.shape[0] - 1) for x in table.unbind(1))
        batch, most = table.shape[0], table.shape[2]
        k, v = k[of_k], v[of_v]
        table = torch.arange(batch * most, dtype=torch.int32, device=table.device).view(batch, most)
    if table.dim() != 2:
        raise InputError(f"block_tables has the shape {tuple(table.shape)}: it must be (requests, pages)")
    return k, v, SimpleNamespace(table=table, lengths=int32_of(lengths))


_DRAFT = """array seen: bits[_, _, _];
let at = k - off;
mask = at < 0 or seen[b, q, at];"""
_PACKED_DRAFT = """array seen: bits[_, _];
array start: i32[_];
let at = k - off;
mask = at < 0 or seen[start[b] + q, at];"""


def _draft(mask, rows, starts):
    """The program of the last tokens of requests that see each other by bits; None without."""
    if mask is None:
        return None
    words = mask.contiguous().view(torch.int32)
    width = (rows + 31) // 32
    need = (width,) if starts is not None else (rows, width)
    if words.dim() != 1 + len(need) or tuple(words.shape[1:]) != need:
        need = f"(tokens, {2 * width})" if starts is not None else f"(requests, {rows}, {2 * width})"
        raise InputError(f"mask has the shape {tuple(mask.shape)}: it must be {need} of uint16")
    if starts is None:
        return Program(_DRAFT, {"seen": words})
    return Program(_PACKED_DRAFT, {"seen": words, "start": starts})


def _of_heads(q, k, v, table, lengths, rows, results, scores, sinks):
    """Attention where each K/V head has pages of its own: heads become requests, of pages of one head."""
    heads, batch = k.shape[2], lengths.shape[-1]
    if table.dim() != 3 or tuple(table.shape[:2]) != (heads, batch) or tuple(lengths.shape) != (heads, batch):
        have = f"{tuple(table.shape)} and {tuple(lengths.shape)}"
        need = f"({heads}, {batch}, pages) and ({heads}, {batch})"
        raise InputError(f"block_tables and seq_lens have the shapes {have}: they must be {need}")
    group = q.shape[-2] // heads
    if sinks is not None and heads > 1:
        raise UnsupportedError(
            "sinks with enable_block_sparse_attention and several K/V heads: leave one out"
        )
    (k, step), (v, step_v) = _pages_of_heads(k), _pages_of_heads(v)
    if step != step_v:
        raise InputError(
            "k_cache and v_cache have other strides: heads with pages of their own need the same"
        )
    of_head = torch.arange(heads, dtype=torch.int32, device=table.device)[:, None, None]
    pages = SimpleNamespace(
        table=(int32_of(table) * step + of_head).flatten(0, 1), lengths=int32_of(lengths).reshape(-1)
    )
    q = q.reshape(batch, rows, heads, group, q.shape[-1]).permute(2, 0, 1, 3, 4).flatten(0, 1)
    call = _call(scores, q, k, -1, rows > 1, sinks, None, results)
    inner = Results(q.dtype if q.dtype.itemsize > 1 else torch.bfloat16, wants_lse=call["return_softmax_lse"])
    made = on_pages(q, k, v, pages, None, rows, inner, dict(call, factor=None))
    made, lse = made if inner.wants_lse else (made, None)

    def by_tokens(x):
        x = x.reshape(heads, batch * rows, group, *x.shape[2:])
        return x.transpose(0, 1).flatten(1, 2)

    results = results._replace(factor=call["factor"], base=1.0)
    return results.of(by_tokens(made), None if lse is None else by_tokens(lse).transpose(0, 1))


def _pages_of_heads(cache):
    """(cache (pages and heads, page, 1, head_dim), distance of pages in those of heads), where it lies."""
    pages, page, heads, width = cache.shape
    between, own, head, inner = cache.stride()
    if heads == 1:
        return cache, 1
    if not head or between % head:
        raise InputError("pages of the cache are no multiple of its heads apart: give a contiguous one")
    step = between // head
    size = ((pages - 1) * step + heads, page, 1, width)
    return cache.as_strided(size, (head, own, head, inner)), step
