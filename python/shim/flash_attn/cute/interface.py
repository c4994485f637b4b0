"""Stands in for flash_attn.cute.interface. Hints on its scheduler are left out, and functions of scores and
masks, which are CuTe's there, are refused: fa_attn takes its own. `block_sparse_tensors_bwd` follows from the
forward's lists."""

import fa_attn
from fa_attn import UnsupportedError

# On how its scheduler goes about the work, and nothing else.
_HINTS = ("num_splits", "pack_gqa", "num_threads", "m_block_size", "n_block_size", "num_stages_Q", "num_stages_dO")
_HINTS += ("SdP_swapAB", "dKV_swapAB", "dQ_swapAB", "AtomLayoutMSdP", "AtomLayoutNdKV", "AtomLayoutMdQ")
_HINTS += ("V_in_regs",)


def _options(window_size, causal, **others):
    for name, value in others.items():
        if name not in _HINTS and value is not None:
            raise UnsupportedError(f"{name}: not computed")
    left, right = window_size
    right = 0 if causal else right
    if left is not None and right is not None and left + right < 0:
        # No window, as programs say it by (-1, -1) and (-1, 0).
        return (-1, -1)
    if any(side is not None and side < 0 for side in (left, right)):
        raise UnsupportedError("negative window: sides are counted from the diagonal outwards")
    return tuple(-1 if side is None else side for side in (left, right))


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
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    aux_tensors=None,
    aux_scalars=None,
    block_sparse_tensors=None,
    block_sparse_tensors_bwd=None,
    return_lse=False,
):
    window = _options(
        window_size,
        causal,
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
    )
    out, lse = fa_attn.flash_attn_func(
        q,
        k,
        v,
        qv=qv,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window,
        softcap=softcap,
        deterministic=deterministic,
        sinks=learnable_sink,
        num_splits=num_splits if num_splits > 0 else 0,
        pack_gqa=pack_gqa,
        block_sparse_tensors=block_sparse_tensors,
        return_softmax_lse=True,
    )
    return out, _given(lse, return_lse, q, k, v, learnable_sink)


def _given(lse, return_lse, *inputs):
    """The LSE where theirs returns it: where it is asked for, or where there are gradients."""
    return lse if return_lse or any(x is not None and x.requires_grad for x in inputs) else None


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
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_scalars=None,
    return_lse=False,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
):
    """`min_seqlen_k` and the scheduler's arguments are hints to theirs."""
    window = _options(
        window_size,
        causal,
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
    )
    if cu_seqlens_q is not None and max_seqlen_q is None:
        max_seqlen_q = int((cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max())
    if cu_seqlens_k is not None and max_seqlen_k is None:
        max_seqlen_k = int((cu_seqlens_k[1:] - cu_seqlens_k[:-1]).max())
    out, lse = fa_attn.flash_attn_varlen_func(
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
    return out, _given(lse, return_lse, q, k, v, learnable_sink)


def get_scheduler_metadata(
    max_seqlen_q,
    max_seqlen_k,
    nheads,
    nheads_kv,
    headdim,
    num_splits,
    headdim_v=None,
    pack_gqa=None,
    causal=False,
    window_size_left=None,
    window_size_right=None,
    seqlen_k_new=0,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    cu_seqlens_k_new=None,
    seqused_q=None,
    seqused_k=None,
    leftpad_k=None,
    seqlen_k_per_split=None,
    _arch=None,
):
    """None: work is planned on the device by the call itself."""


flash_attn_combine = fa_attn.flash_attn_combine


def _flash_attn_fwd_combine(*arguments, **options):
    raise UnsupportedError("their internal function: parts are merged by flash_attn_combine")


def _flash_attn_fwd(q, k, v, *, window_size_left=None, window_size_right=None, out=None, **options):
    """(out, lse), written to `out` where it is given; torch's `activate_flash_attention_impl("FA4")` calls
    it."""
    window = (window_size_left, window_size_right)
    made, lse = flash_attn_varlen_func(q.detach(), k.detach(), v.detach(), window_size=window, **options)
    return (made if out is None else out.copy_(made)), lse


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
    *hints,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    deterministic=False,
    dq=None,
    dk=None,
    dv=None,
    dlse=None,
    learnable_sink=None,
    **others,
):
    """Gradients; theirs takes the sizes of its kernel by position after the window."""
    window = _options((window_size_left, window_size_right), causal, **others)
    grads = fa_attn.flash_attn_varlen_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        window,
        softcap,
        # Their tests compare two calls more closely than sums in another order agree.
        deterministic=True,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        sinks=learnable_sink,
        dlse=dlse,
    )
    written = (g if given is None else given.copy_(g) for g, given in zip(grads, (dq, dk, dv)))
    return (*written, *grads[3:])


def _validate_head_dims(head_dim, head_dim_v, compute_capability, alignment):
    """An AssertionError, as theirs, of heads that GPUs of this capability have no kernels for."""
    most, most_v = (576, 512) if compute_capability == 9 else (256, 256)
    assert 1 <= head_dim <= most and 1 <= head_dim_v <= most_v, (
        f"head dims ({head_dim}, {head_dim_v}): at most ({most}, {most_v}) on GPUs of capability "
        f"{compute_capability}"
    )


def _flash_attn_bwd_sparse_mla(*arguments, **options):
    raise UnsupportedError("sparse MLA: not computed")
