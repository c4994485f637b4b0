"""Stands in for flash_mla.flash_mla_interface: `fa_attn.flash_mla`, and attention of packed sequences for
prefill and training, whose LSE is (total, heads)."""

import fa_attn
from fa_attn.flash_mla import (
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_qo,
    cu_seqlens_kv,
    max_seqlen_qo,
    max_seqlen_kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    deterministic=False,
    is_varlen=True,
):
    """(out, lse). `is_varlen` is a hint for kernels: lengths are those of the starts, equal or not."""
    out, lse = fa_attn.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_qo,
        cu_seqlens_kv,
        max_seqlen_qo,
        max_seqlen_kv,
        dropout_p,
        softmax_scale,
        causal,
        deterministic=deterministic,
        return_softmax_lse=True,
    )
    return out, lse.transpose(0, 1)


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    head_dim_qk,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    deterministic=False,
    is_varlen=True,
):
    """qkv (total, heads, 2 * head_dim_qk + head_dim_v)."""
    q, k, v = qkv.tensor_split((head_dim_qk, 2 * head_dim_qk), dim=-1)
    starts, longest = (cu_seqlens, cu_seqlens), (max_seqlen, max_seqlen)
    options = (dropout_p, softmax_scale, causal, deterministic, is_varlen)
    return flash_attn_varlen_func(q, k, v, *starts, *longest, *options)


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_qo,
    cu_seqlens_kv,
    max_seqlen_qo,
    max_seqlen_kv,
    head_dim_qk,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    deterministic=False,
    is_varlen=True,
):
    """kv (total, heads, head_dim_qk + head_dim_v)."""
    k, v = kv.tensor_split((head_dim_qk,), dim=-1)
    lengths = (cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv)
    options = (dropout_p, softmax_scale, causal, deterministic, is_varlen)
    return flash_attn_varlen_func(q, k, v, *lengths, *options)
