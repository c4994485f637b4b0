"""Stands in for FlashAttention-3's module `flash_attn_interface`.

`dropout_p` and `s_aux` (sinks, as vLLM's build has them) are not among its arguments: transformers gives them to
functions that have them, and computes without them where they are missing.
"""

import flash_attn_3._C  # noqa: F401
import torch
from flash_attn import _refuse_another
from flash_attn.flash_attn_interface import maybe_contiguous, round_multiple  # noqa: F401

import fa_attn
from fa_attn import InputError, UnsupportedError

_refuse_another("flash-attn-3")

# The operators by the name under which programs with an autograd of their own import them.
flash_attn_3_gpu = torch.ops.flash_attn_3


def _refuse(**given):
    for name, value in given.items():
        if value is not None and not (isinstance(value, int) and value == 0):
            raise UnsupportedError(f"{name}: not computed")


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
    *,
    dropout_p=0.0,
    s_aux=None,
):
    return fa_attn.flash_attn_func(
        q,
        k,
        v,
        qv=qv,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_softmax_lse=return_attn_probs,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        attention_chunk=attention_chunk,
        sm_margin=sm_margin,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        dropout_p=dropout_p,
        s_aux=s_aux,
    )


def flash_attn_qkvpacked_func(
    qkv,
    softmax_scale=None,
    causal=False,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    deterministic=False,
    num_heads_q=None,
    sm_margin=0,
    return_attn_probs=False,
):
    """Attention of qkv (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, heads of all three, head_dim)
    with `num_heads_q`."""
    options = dict(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        attention_chunk=attention_chunk,
        sm_margin=sm_margin,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        return_softmax_lse=return_attn_probs,
    )
    if len(qkv.shape) == 5:
        return fa_attn.flash_attn_qkvpacked_func(qkv, **options)
    heads = qkv.shape[2]
    if num_heads_q is None or not 0 < num_heads_q < heads or (heads - num_heads_q) % 2:
        raise InputError(f"num_heads_q = {num_heads_q}: of {heads} heads it must leave an even number for k and v")
    heads_kv = (heads - num_heads_q) // 2
    q, k, v = qkv.split([num_heads_q, heads_kv, heads_kv], dim=2)
    return fa_attn.flash_attn_func(q, k, v, **options)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
    *,
    dropout_p=0.0,
    s_aux=None,
):
    return fa_attn.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        qv=qv,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        return_softmax_lse=return_attn_probs,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        attention_chunk=attention_chunk,
        sm_margin=sm_margin,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        dropout_p=dropout_p,
        s_aux=s_aux,
    )


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
    *,
    s_aux=None,
):
    return fa_attn.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        page_table=page_table,
        qv=qv,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens,
        scheduler_metadata=scheduler_metadata,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        attention_chunk=attention_chunk,
        sm_margin=sm_margin,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        s_aux=s_aux,
        return_softmax_lse=return_softmax_lse,
    )


get_scheduler_metadata = fa_attn.get_scheduler_metadata
flash_attn_combine = fa_attn.flash_attn_combine


def _flash_attn_forward(
    q,
    k,
    v,
    k_new=None,
    v_new=None,
    qv=None,
    out_=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    cu_seqlens_k_new=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    page_table=None,
    kv_batch_idx=None,
    leftpad_k=None,
    rotary_cos=None,
    rotary_sin=None,
    seqlens_rotary=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size_left=-1,
    window_size_right=-1,
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=1,
    pack_gqa=None,
    sm_margin=0,
):
    """(out, softmax_lse, two empty partial results), without autograd."""
    options = dict(
        qv=qv,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        page_table=page_table,
        out=out_,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        attention_chunk=attention_chunk,
        sm_margin=sm_margin,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        return_softmax_lse=True,
    )
    of_a_cache = dict(k=k_new, v=v_new, cache_batch_idx=kv_batch_idx, cache_leftpad=leftpad_k)
    with torch.no_grad():
        if any(x is not None for x in of_a_cache.values()):
            _refuse(cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q)
            out, lse = fa_attn.flash_attn_with_kvcache(
                q,
                k,
                v,
                rotary_cos=rotary_cos,
                rotary_sin=rotary_sin,
                cache_seqlens=seqused_k,
                rotary_interleaved=rotary_interleaved,
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k_new=cu_seqlens_k_new,
                max_seqlen_q=max_seqlen_q,
                rotary_seqlens=seqlens_rotary,
                scheduler_metadata=scheduler_metadata,
                **of_a_cache,
                **options,
            )
        else:
            _refuse(rotary_cos=rotary_cos, cu_seqlens_k_new=cu_seqlens_k_new)
            lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            used = dict(seqused_q=seqused_q, seqused_k=seqused_k)
            out, lse = fa_attn.flash_attn_varlen_func(q, k, v, *lengths, **used, **options)
    return out, lse, out.new_empty((0,)), lse.new_empty((0,))


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    sequed_q=None,
    sequed_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dq=None,
    dk=None,
    dv=None,
    softmax_scale=None,
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    deterministic=False,
    sm_margin=0,
    *,
    window_size=None,
):
    """Writes dq, dk and dv; returns rowsum(O * dO). With `window_size`, as in their test of bitwise equality,
    returns (dq, dk, dv, rowsum(O * dO))."""
    _refuse(sm_margin=sm_margin)
    window = (window_size_left, window_size_right) if window_size is None else window_size
    grads = fa_attn.flash_attn_varlen_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        is_causal,
        window,
        softcap,
        deterministic=deterministic,
        seqused_q=sequed_q,
        seqused_k=sequed_k,
    )
    grads = tuple(g if given is None else given.copy_(g) for g, given in zip(grads, (dq, dk, dv)))
    delta = (out.float() * dout.float()).sum(-1).transpose(-1, -2)
    return delta if window_size is None else (*grads, delta)
