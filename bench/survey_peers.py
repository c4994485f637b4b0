"""What computes the rows of survey.py: ours, and the peers that are installed."""

import sys

import torch
import torch.nn.functional as F
from survey_rows import DEVICE, E4M3, F16, Case, row
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_attn


def swapped(x):
    return x.transpose(1, 2)


def first(found):
    return found[0] if isinstance(found, (tuple, list)) else found


def window_of(own):
    return (own.window or -1, (0 if own.causal else own.window) if own.window else -1)


def ours(case):
    own = case.row
    if own.form == "sdpa":
        seen = case.bias if own.bias else case.mask
        return lambda: swapped(
            fa_attn.scaled_dot_product_attention(*map(swapped, (case.q, case.k, case.v)), attn_mask=seen)
        )
    if own.form == "packed":
        bounds = (case.starts, case.starts, own.keys, own.keys)
        return lambda: fa_attn.flash_attn_varlen_func(case.q, case.k, case.v, *bounds, causal=own.causal)
    if own.form == "latents":
        from fa_attn.flash_mla import flash_mla_with_kvcache, get_mla_metadata

        metadata, splits = get_mla_metadata()
        return lambda: flash_mla_with_kvcache(
            case.q,
            case.k,
            case.table,
            case.used,
            own.dim_v,
            metadata,
            splits,
            softmax_scale=case.scale,
            causal=True,
        )[0]
    if own.page:
        options = dict(cache_seqlens=case.used, block_table=case.table, causal=True)
        k, v = (case.k, case.v) if case.k_codes is None else (case.k_codes, case.v_codes)
        if case.k_codes is not None:
            one = torch.ones(1, device=DEVICE)
            options.update(k_descale=one, v_descale=one)
        return lambda: fa_attn.flash_attn_with_kvcache(case.q, k, v, **options)
    options = dict(causal=own.causal)
    if own.window:
        options["window_size"] = window_of(own)
    if own.softcap:
        options["softcap"] = own.softcap
    if case.slopes is not None:
        options["alibi_slopes"] = case.slopes
    return lambda: fa_attn.flash_attn_func(case.q, case.k, case.v, **options)


def ours_planned(case):
    own = case.row
    if own.form != "paged":
        return None
    k, v = (case.k, case.v) if case.k_codes is None else (case.k_codes, case.v_codes)
    plan = fa_attn.get_scheduler_metadata(
        own.batch,
        own.queries,
        own.keys,
        own.heads,
        own.heads_kv,
        own.dim,
        case.used,
        qkv_dtype=case.dtype,
        page_size=own.page,
        causal=True,
    )
    options = dict(cache_seqlens=case.used, block_table=case.table, causal=True, scheduler_metadata=plan)
    if case.k_codes is not None:
        one = torch.ones(1, device=DEVICE)
        options.update(k_descale=one, v_descale=one)
    return lambda: fa_attn.flash_attn_with_kvcache(case.q, k, v, **options)


def ours_16_bits(case):
    """The cache of codes as numbers."""
    own = case.row
    if not own.codes:
        return None
    options = dict(cache_seqlens=case.used, block_table=case.table, causal=True)
    return lambda: fa_attn.flash_attn_with_kvcache(case.q, case.k, case.v, **options)


def torch_with(backend):
    def of(case):
        own = case.row
        is_plain = own.form in ("dense", "decode", "chunk") and not (own.window or own.softcap or own.alibi)
        if not is_plain and own.form != "sdpa":
            return None
        if own.causal and own.queries != own.keys:
            return None
        seen = case.bias if own.bias else case.mask
        if seen is not None and backend is SDPBackend.FLASH_ATTENTION:
            return None
        if seen is not None:
            seen = seen.expand(own.batch, own.heads, own.queries, own.keys)
        grouped = own.heads != own.heads_kv
        if grouped and backend is SDPBackend.EFFICIENT_ATTENTION:
            return None

        def call():
            with sdpa_kernel(backend):
                return swapped(
                    F.scaled_dot_product_attention(
                        *map(swapped, (case.q, case.k, case.v)),
                        attn_mask=seen,
                        is_causal=own.causal,
                        enable_gqa=grouped,
                    )
                )

        return call

    return of


def fa2(case):
    """torch's FlashAttention-2 by its operator, which has windows, slopes and packed rows."""
    own = case.row
    if own.form not in ("dense", "packed", "decode", "chunk") or own.softcap or own.dim != own.dim_v:
        return None
    left, right = window_of(own)
    options = dict(
        window_size_left=left if left >= 0 else None, window_size_right=right if left >= 0 else None
    )
    if case.slopes is not None:
        options["alibi_slopes"] = case.slopes
    starts = case.starts if own.form == "packed" else None
    fixed = (starts, starts, own.queries, own.keys, 0.0, own.causal, False)
    return lambda: torch.ops.aten._flash_attention_forward(case.q, case.k, case.v, *fixed, **options)[0]


def fa3():
    import fa3_fwd_interface as library

    def of(case):
        own = case.row
        q, k, v = (x.detach() for x in (case.q, case.k, case.v))
        if own.window or own.alibi or own.form == "sdpa" or case.dtype is F16 or own.codes:
            return None
        if own.form == "packed":
            bounds = (case.starts, case.starts, own.keys, own.keys)
            return lambda: first(library.flash_attn_varlen_func(q, k, v, *bounds, causal=own.causal))
        if own.form == "latents":
            qv, qr, rope, latent = q[..., :512], q[..., 512:], k[..., 512:], k[..., :512]
            options = dict(
                qv=qv, page_table=case.table, cache_seqlens=case.used, causal=True, softmax_scale=case.scale
            )
            return lambda: first(library.flash_attn_with_kvcache(qr, rope, latent, **options))
        if own.page:
            if own.page % 128:
                return None
            options = dict(page_table=case.table, cache_seqlens=case.used, causal=True)
            return lambda: first(library.flash_attn_with_kvcache(q, k, v, **options))
        if own.form in ("decode", "chunk"):
            return lambda: first(library.flash_attn_with_kvcache(q, k, v, causal=own.causal))
        options = dict(causal=own.causal, softcap=own.softcap or 0.0)
        return lambda: first(library.flash_attn_func(q, k, v, **options))

    return of


def flash_mla():
    from flash_mla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

    def of(case):
        if case.row.form != "latents":
            return None
        metadata, _ = get_mla_metadata()
        options = dict(softmax_scale=case.scale, causal=True, use_legacy=True)
        return lambda: flash_mla_with_kvcache(
            case.q, case.k, case.table, case.used, 512, metadata, **options
        )[0]

    return of


def infer_of(library, case):
    """FlashInfer's decode, planned before."""
    own = case.row
    codes = case.k_codes is not None
    k, v = (case.k_codes, case.v_codes) if codes else (case.k, case.v)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE), "NHD", use_tensor_cores=True
    )
    last = torch.tensor([(n - 1) % own.page + 1 for n in case.lengths], device=DEVICE, dtype=torch.int32)
    wrapper.plan(
        case.page_starts,
        case.pages,
        last,
        own.heads,
        own.heads_kv,
        own.dim,
        own.page,
        q_data_type=case.dtype,
        kv_data_type=k.dtype,
    )
    kv = torch.stack((k, v), 1)
    return lambda: wrapper.run(case.q[:, 0], kv)[:, None]


def flash_infer():
    import flashinfer as library

    def of(case):
        own = case.row
        if own.form != "paged" or own.queries != 1 or own.dim != 128:
            return None
        return infer_of(library, case)

    return of


def compile_infer(codes, infers):
    """Compiles FlashInfer's kernel, in a process of its own, and counts it."""
    try:
        import flashinfer as library

        case = Case(row("paged", 2, 1, 200, 8, 2, 128, page=16, **({"codes": E4M3} if codes else {})))
        infer_of(library, case)()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - a peer that is not there
        print(f"flashinfer: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
    with infers.get_lock():
        infers.value += 1


def contestants():
    found, missing = {"fa": ours, "fa planned": ours_planned, "fa 16 bits": ours_16_bits}, {}
    found["cudnn"] = torch_with(SDPBackend.CUDNN_ATTENTION)
    found["efficient"] = torch_with(SDPBackend.EFFICIENT_ATTENTION)
    found["fa2"] = fa2
    for name, load in (("fa3", fa3), ("flashmla", flash_mla), ("flashinfer", flash_infer)):
        try:
            found[name] = load()
        except Exception as error:  # noqa: BLE001 - whatever an import raises
            missing[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return found, missing
