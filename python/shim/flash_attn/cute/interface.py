"""Stands in for flash_attn.cute.interface. Hints on its scheduler are left out."""

import fa_attn
from fa_attn import UnsupportedError

# On how its scheduler goes about the work, and nothing else.
_HINTS = (
    "num_splits",  # of a backward, and `pack_gqa`: forwards take them
    "pack_gqa",
    "min_seqlen_k",
    "scheduler_metadata",
    "seqlen_k_per_split",
    "disable_scheduler_metadata",
)


def _options(window_size, others):
    for name, value in others.items():
        if name not in _HINTS and value is not None:
            raise UnsupportedError(f"{name}: not computed")
    if any(side is not None and side < 0 for side in window_size):
        raise UnsupportedError("negative window: sides are counted from the diagonal outwards")
    return tuple(-1 if side is None else side for side in window_size)


def flash_attn_func(
    q,
    k,
    v,
    qv=None,
    gather_kv_indices=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    return_lse=False,
    **others,
):
    window = _options(window_size, {"qv": qv, "gather_kv_indices": gather_kv_indices, **others})
    return fa_attn.flash_attn_func(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window,
        softcap=softcap,
        deterministic=deterministic,
        sinks=learnable_sink,
        num_splits=num_splits if num_splits > 0 else 0,
        pack_gqa=pack_gqa,
        return_softmax_lse=True,
    )


def flash_attn_varlen_func(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    return_lse=False,
    **others,
):
    window = _options(window_size, {"qv": qv, "gather_kv_indices": gather_kv_indices, **others})
    if cu_seqlens_q is not None and max_seqlen_q is None:
        max_seqlen_q = int((cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max())
    if cu_seqlens_k is not None and max_seqlen_k is None:
        max_seqlen_k = int((cu_seqlens_k[1:] - cu_seqlens_k[:-1]).max())
    return fa_attn.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window,
        softcap=softcap,
        deterministic=deterministic,
        page_table=page_table,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        sinks=learnable_sink,
        num_splits=num_splits if num_splits > 0 else 0,
        pack_gqa=pack_gqa,
        return_softmax_lse=True,
    )


def get_scheduler_metadata(*arguments, **options):
    """Work is planned on the device by the call itself."""
    return None


flash_attn_combine = fa_attn.flash_attn_combine


def _flash_attn_fwd_combine(*arguments, **options):
    raise UnsupportedError("their internal function: parts are merged by flash_attn_combine")


def _flash_attn_fwd(q, k, v, **options):
    return flash_attn_varlen_func(q.detach(), k.detach(), v.detach(), **options)


def _flash_attn_bwd(
    q,
    k,
    v,
    out,
    dout,
    lse,
    softmax_scale=None,
    causal=False,
    softcap=0.0,
    window_size_left=None,
    window_size_right=None,
    deterministic=True,
    dq=None,
    dk=None,
    dv=None,
    **others,
):
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    sides = [others.pop(name, None) for name in names]
    window = _options((window_size_left, window_size_right), others)
    # Two calls are compared more closely than sums in another order agree.
    options = (softmax_scale, causal, window, softcap)
    grads = fa_attn.flash_attn_varlen_backward(
        dout, q, k, v, out, lse, *sides, *options, deterministic=True
    )
    return tuple(g if given is None else given.copy_(g) for g, given in zip(grads, (dq, dk, dv)))


def _flash_attn_bwd_sparse_mla(*arguments, **options):
    raise UnsupportedError("sparse MLA: not computed")
