"""Stands in for flash_attn.modules.mha: its modules without weights, which take q, k and v."""

import math

import torch

import fa_attn


def get_alibi_slopes(nheads):
    """A slope for each head: powers of 2 from 2^(-8 / n) on, n the heads' number or the power of 2 below it,
    then every other one of those for 2 n."""
    whole = 2 ** int(math.log2(nheads))
    slopes = [2.0 ** (-8.0 * i / whole) for i in range(1, whole + 1)]
    return slopes + [2.0 ** (-4.0 * i / whole) for i in range(1, 2 * (nheads - whole), 2)]


class _Attention(torch.nn.Module):
    def __init__(self, causal, softmax_scale, attention_dropout, options):
        super().__init__()
        self.causal, self.softmax_scale = causal, softmax_scale
        self.drop = torch.nn.Dropout(attention_dropout)
        self.register_buffer("alibi_slopes", options.pop("alibi_slopes", None), persistent=False)
        self.options = options

    def _given(self, causal):
        slopes = self.alibi_slopes
        return dict(
            dropout_p=self.drop.p if self.training else 0.0,
            softmax_scale=self.softmax_scale,
            causal=self.causal if causal is None else causal,
            alibi_slopes=None if slopes is None else slopes.float(),
            **self.options,
        )


class FlashSelfAttention(_Attention):
    """Attention of qkv (batch, seqlen, 3, heads, head_dim), or packed (total, 3, heads, head_dim) with
    `cu_seqlens` and `max_seqlen`. Dropout while training."""

    def __init__(
        self,
        causal=False,
        softmax_scale=None,
        attention_dropout=0.0,
        window_size=(-1, -1),
        alibi_slopes=None,
        deterministic=False,
    ):
        options = dict(window_size=window_size, alibi_slopes=alibi_slopes, deterministic=deterministic)
        super().__init__(causal, softmax_scale, attention_dropout, options)

    def forward(self, qkv, causal=None, cu_seqlens=None, max_seqlen=None):
        given = self._given(causal)
        if cu_seqlens is None:
            return fa_attn.flash_attn_qkvpacked_func(qkv, **given)
        return fa_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **given)


class FlashCrossAttention(_Attention):
    """Attention of q (batch, seqlen_q, heads, head_dim) on kv (batch, seqlen_k, 2, heads_kv, head_dim), or of
    packed rows with lengths of both. Dropout while training."""

    def __init__(
        self,
        causal=False,
        softmax_scale=None,
        attention_dropout=0.0,
        alibi_slopes=None,
        window_size=(-1, -1),
        deterministic=False,
    ):
        options = dict(window_size=window_size, alibi_slopes=alibi_slopes, deterministic=deterministic)
        super().__init__(causal, softmax_scale, attention_dropout, options)

    def forward(
        self, q, kv, causal=None, cu_seqlens=None, max_seqlen=None, cu_seqlens_k=None, max_seqlen_k=None
    ):
        given = self._given(causal)
        if cu_seqlens is None:
            return fa_attn.flash_attn_kvpacked_func(q, kv, **given)
        lengths = (cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k)
        return fa_attn.flash_attn_varlen_kvpacked_func(q, kv, *lengths, **given)


class SelfAttention(_Attention):
    """Attention of qkv (batch, seqlen, 3, heads, head_dim) on keys where `key_padding_mask` (batch, seqlen) is
    True."""

    def __init__(self, causal=False, softmax_scale=None, attention_dropout=0.0):
        super().__init__(causal, softmax_scale, attention_dropout, {})

    def forward(self, qkv, causal=None, key_padding_mask=None):
        return _padded(*qkv.unbind(2), key_padding_mask, self._given(causal))


class CrossAttention(_Attention):
    """The same of q (batch, seqlen_q, heads, head_dim) and kv (batch, seqlen_k, 2, heads_kv, head_dim)."""

    def __init__(self, causal=False, softmax_scale=None, attention_dropout=0.0):
        super().__init__(causal, softmax_scale, attention_dropout, {})

    def forward(self, q, kv, causal=None, key_padding_mask=None):
        return _padded(q, *kv.unbind(2), key_padding_mask, self._given(causal))


def _padded(q, k, v, key_padding_mask, given):
    mask = None if key_padding_mask is None else key_padding_mask[:, None, None]
    return fa_attn.flash_attn_func(q, k, v, mask=mask, **given)
