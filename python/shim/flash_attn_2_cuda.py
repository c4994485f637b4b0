"""Stands in for FlashAttention-2's extension module, by the order of its arguments, as programs call it that
have an autograd of their own (xformers and others)."""

from fa_attn import InputError


def _check(generator):
    if generator is not None:
        raise InputError("generator: the state of torch's own generator decides what is dropped, give None")


def _written(out, result):
    return result if out is None else out.copy_(result)


def fwd(
    q,
    k,
    v,
    out,
    alibi_slopes,
    p_dropout,
    softmax_scale,
    is_causal,
    window_size_left,
    window_size_right,
    softcap,
    return_softmax,
    generator=None,
):
    """[out, softmax_lse, probabilities, state of the generator]."""
    from flash_attn.flash_attn_interface import _flash_attn_forward

    _check(generator)
    window = (window_size_left, window_size_right)
    options = (p_dropout, softmax_scale, is_causal, *window, softcap, alibi_slopes, return_softmax)
    made, *others = _flash_attn_forward(q, k, v, *options)
    return [_written(out, made), *others]


def varlen_fwd(
    q,
    k,
    v,
    out,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_k,
    leftpad_k,
    block_table,
    alibi_slopes,
    max_seqlen_q,
    max_seqlen_k,
    p_dropout,
    softmax_scale,
    zero_tensors,
    is_causal,
    window_size_left,
    window_size_right,
    softcap,
    return_softmax,
    generator=None,
    num_splits=0,
):
    """The same of packed sequences."""
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    _check(generator)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = (window_size_left, window_size_right)
    options = (p_dropout, softmax_scale, is_causal, *window, softcap, alibi_slopes, return_softmax)
    made, *others = _flash_attn_varlen_forward(
        q,
        k,
        v,
        *lengths,
        *options,
        block_table=block_table,
        leftpad_k=leftpad_k,
        seqused_k=seqused_k,
        zero_tensors=zero_tensors,
        num_splits=num_splits,
    )
    return [_written(out, made), *others]


def _rooms(q, k, v, *given):
    return [x.new_empty(x.shape) if room is None else room for x, room in zip((q, k, v), given)]


def bwd(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    alibi_slopes,
    p_dropout,
    softmax_scale,
    is_causal,
    window_size_left,
    window_size_right,
    softcap,
    deterministic,
    generator=None,
    rng_state=None,
):
    """[dq, dk, dv, rowsum(O * dO)]; the gradients are written to the tensors given for them."""
    from flash_attn.flash_attn_interface import _flash_attn_backward

    _check(generator)
    grads = _rooms(q, k, v, dq, dk, dv)
    window = (window_size_left, window_size_right)
    options = (p_dropout, softmax_scale, is_causal, *window, softcap, alibi_slopes, deterministic, rng_state)
    delta = _flash_attn_backward(dout, q, k, v, out, softmax_lse, *grads, *options)
    return [*grads, delta]


def varlen_bwd(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    alibi_slopes,
    max_seqlen_q,
    max_seqlen_k,
    p_dropout,
    softmax_scale,
    zero_tensors,
    is_causal,
    window_size_left,
    window_size_right,
    softcap,
    deterministic,
    generator=None,
    rng_state=None,
):
    """The same of packed sequences."""
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    _check(generator)
    grads = _rooms(q, k, v, dq, dk, dv)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = (window_size_left, window_size_right)
    options = (p_dropout, softmax_scale, is_causal, *window, softcap, alibi_slopes, deterministic, rng_state)
    delta = _flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, *grads, *lengths, *options)
    return [*grads, delta]


def fwd_kvcache(
    q,
    kcache,
    vcache,
    k,
    v,
    seqlens_k,
    rotary_cos,
    rotary_sin,
    cache_batch_idx,
    leftpad_k,
    block_table,
    alibi_slopes,
    out,
    softmax_scale,
    is_causal,
    window_size_left,
    window_size_right,
    softcap,
    is_rotary_interleaved,
    num_splits,
):
    """[out, softmax_lse] of a cache, to which k and v are appended."""
    import fa_attn

    return list(
        fa_attn.flash_attn_with_kvcache(
            q,
            kcache,
            vcache,
            k,
            v,
            rotary_cos,
            rotary_sin,
            seqlens_k,
            cache_batch_idx,
            leftpad_k,
            block_table,
            softmax_scale,
            is_causal,
            (window_size_left, window_size_right),
            softcap,
            is_rotary_interleaved,
            alibi_slopes,
            num_splits,
            return_softmax_lse=True,
            out=out,
        )
    )
