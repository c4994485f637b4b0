"""Stands in for flash_attn.flash_attn_triton, functions with a bias, which GPT-NeoX and MPT call for ALiBi.
Causal masks begin in the top left corner, and biases have gradients."""

import fa_attn


def flash_attn_func(q, k, v, bias=None, causal=False, softmax_scale=None):
    """`bias` is broadcast to (batch, heads, seqlen_q, seqlen_k) and added to the scaled scores."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    shared = q.shape[1] != k.shape[1]
    out = fa_attn.scaled_dot_product_attention(q, k, v, bias, 0.0, causal, softmax_scale, shared)
    return out.transpose(1, 2).contiguous()


def flash_attn_kvpacked_func(q, kv, bias=None, causal=False, softmax_scale=None):
    """The same of kv (batch, seqlen_k, 2, heads, head_dim)."""
    return flash_attn_func(q, *kv.unbind(2), bias, causal, softmax_scale)


def flash_attn_qkvpacked_func(qkv, bias=None, causal=False, softmax_scale=None):
    """The same of qkv (batch, seqlen, 3, heads, head_dim)."""
    return flash_attn_func(*qkv.unbind(2), bias, causal, softmax_scale)
