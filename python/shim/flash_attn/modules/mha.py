"""Stands in for flash_attn.modules.mha: attention of q, k and v, and the layer with projections around it."""

import math

import torch
from torch.utils.checkpoint import checkpoint

import fa_attn
from fa_attn import InputError, UnsupportedError

from .. import (  # noqa: F401
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from ..layers.rotary import RotaryEmbedding


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


class MHA(torch.nn.Module):
    """A layer of attention with its projections, on x (batch, seqlen, embed_dim), or packed (total, embed_dim)
    with `cu_seqlens` and `max_seqlen`; parameters have the names of theirs. With `inference_params` keys and
    values are appended to the cache that it holds for `layer_idx`."""

    def __init__(
        self,
        embed_dim,
        num_heads,
        num_heads_kv=None,
        cross_attn=False,
        qkv_proj_bias=True,
        out_proj_bias=True,
        dropout=0.0,
        softmax_scale=None,
        causal=False,
        layer_idx=None,
        dwconv=False,
        rotary_emb_dim=0,
        rotary_emb_base=10000.0,
        rotary_emb_scale_base=None,
        rotary_emb_interleaved=False,
        use_alibi=False,
        window_size=(-1, -1),
        fused_bias_fc=False,
        use_flash_attn=False,
        return_residual=False,
        checkpointing=False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if dwconv:
            raise UnsupportedError("dwconv: the layer has no convolution, leave it False")
        if embed_dim % num_heads or num_heads % heads_kv:
            raise InputError(
                f"embed_dim = {embed_dim}, {num_heads} heads and {heads_kv} of keys: each must divide"
            )
        if cross_attn and rotary_emb_dim > 0:
            raise UnsupportedError("rotary_emb_dim with cross_attn: leave one of them out")
        if not use_flash_attn and (use_alibi or tuple(window_size) != (-1, -1)):
            raise InputError("use_alibi and window_size need use_flash_attn=True")
        self.embed_dim, self.num_heads, self.num_heads_kv = embed_dim, num_heads, heads_kv
        self.head_dim, self.cross_attn, self.causal = embed_dim // num_heads, cross_attn, causal
        self.layer_idx, self.use_flash_attn, self.rotary_emb_dim = layer_idx, use_flash_attn, rotary_emb_dim
        self.return_residual, self.checkpointing = return_residual, checkpointing
        made = dict(device=device, dtype=dtype)
        if rotary_emb_dim > 0:
            kind = dict(
                base=rotary_emb_base, interleaved=rotary_emb_interleaved, scale_base=rotary_emb_scale_base
            )
            self.rotary_emb = RotaryEmbedding(rotary_emb_dim, device=device, **kind)
        columns = 2 * self.head_dim * heads_kv
        if cross_attn:
            self.Wq = torch.nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **made)
            self.Wkv = torch.nn.Linear(embed_dim, columns, bias=qkv_proj_bias, **made)
        else:
            self.Wqkv = torch.nn.Linear(embed_dim, embed_dim + columns, bias=qkv_proj_bias, **made)
        self.out_proj = torch.nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **made)
        options = dict(causal=causal, softmax_scale=softmax_scale, attention_dropout=dropout)
        kind = CrossAttention
        if use_flash_attn:
            slopes = torch.tensor(get_alibi_slopes(num_heads), device=device) if use_alibi else None
            options.update(window_size=tuple(window_size), alibi_slopes=slopes)
            kind = FlashCrossAttention
        self.inner_cross_attn = kind(**options)

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None):
        """Room for the keys and values, (batch, max_seqlen, 2, heads_kv, head_dim)."""
        weight = self.out_proj.weight
        shape = (batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim)
        return torch.empty(shape, dtype=dtype or weight.dtype, device=weight.device)

    def forward(
        self,
        x,
        x_kv=None,
        key_padding_mask=None,
        cu_seqlens=None,
        max_seqlen=None,
        mixer_subset=None,
        inference_params=None,
        **options,
    ):
        if key_padding_mask is not None and (self.use_flash_attn or inference_params is not None):
            raise InputError("key_padding_mask needs use_flash_attn=False and no inference_params")
        if cu_seqlens is not None and not (self.use_flash_attn and inference_params is None):
            raise InputError("cu_seqlens needs use_flash_attn=True and no inference_params")
        if cu_seqlens is not None and self.rotary_emb_dim > 0:
            raise UnsupportedError("cu_seqlens with rotary_emb_dim: give padded rows")
        if self.cross_attn:
            q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
            kv = self.Wkv(x if x_kv is None else x_kv)
        elif x_kv is None and mixer_subset is None:
            q, kv = self.Wqkv(x).tensor_split([self.embed_dim], dim=-1)
        else:
            raise InputError("x_kv and mixer_subset need cross_attn=True")
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        kv = kv.unflatten(-1, (2, self.num_heads_kv, self.head_dim))
        if self.rotary_emb_dim > 0:
            at, most = 0, None
            if inference_params is not None:
                at, most = _used(inference_params), inference_params.max_seqlen
            # They turn in place, and what a projection returns may be kept for its gradient.
            q, kv = self.rotary_emb(q.clone(), kv.clone(), seqlen_offset=at, max_seqlen=most)
        if inference_params is not None:
            context = self._on_cache(q, kv, inference_params)
        else:
            if self.use_flash_attn and cu_seqlens is not None:
                both = dict(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
                options = {**both, "cu_seqlens_k": cu_seqlens, "max_seqlen_k": max_seqlen, **options}
            elif not self.use_flash_attn:
                options = dict(key_padding_mask=key_padding_mask, **options)
            if self.checkpointing:
                context = checkpoint(self.inner_cross_attn, q, kv, use_reentrant=False, **options)
            else:
                context = self.inner_cross_attn(q, kv, **options)
        out = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out

    def _on_cache(self, q, kv, params):
        if self.layer_idx is None:
            raise InputError("layer_idx is None: with inference_params it must be the layer's number")
        caches = params.key_value_memory_dict
        if self.layer_idx not in caches:
            room = self.allocate_inference_cache(params.max_batch_size, params.max_seqlen, kv.dtype)
            caches[self.layer_idx] = room
        begin = params.batch_size_offset
        k_cache, v_cache = caches[self.layer_idx][begin : begin + len(q)].unbind(2)
        given = self.inner_cross_attn._given(None)
        del given["dropout_p"]
        given.pop("deterministic", None)
        used = _used(params)
        return fa_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, *kv.unbind(2), cache_seqlens=used, **given
        )


def _used(params):
    """The keys that are in the cache: of each sequence, or of all."""
    lengths = params.lengths_per_sample
    return params.seqlen_offset if lengths is None else lengths
