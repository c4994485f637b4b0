"""Stands in for flash_attn.layers.rotary: rotary embedding in plain torch."""

import torch

from ..ops.triton.rotary import apply_rotary, rotated


class _InPlace(torch.autograd.Function):
    """What `turn(x, conjugate)` does to x in place, also to a leaf and to one of several views of a projection's
    result, unseen by autograd as their kernel's; it is linear, and its conjugate is the transpose."""

    @staticmethod
    def forward(ctx, x, turn):
        ctx.turn = turn
        turn(x.data, False)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        ctx.turn(grad, True)
        return grad, None


def _in_place(x, turn):
    if x.requires_grad and torch.is_grad_enabled():
        return _InPlace.apply(x, turn)
    turn(x, False)
    return x


def apply_rotary_emb(
    x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None
):
    """x (batch, seqlen, heads, dim), or (total, heads, dim) with cu_seqlens; cos and sin (positions,
    rotary_dim / 2). Row i of a sequence is rotated by the position `seqlen_offsets` + i."""

    def turn(x, conjugate, inplace=True):
        return apply_rotary(
            x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace, conjugate
        )

    return _in_place(x, turn) if inplace else turn(x, False, inplace=False)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x, cos, sin, interleaved=False):
    """The same for x (batch, seqlen, heads, dim) and tables of its rows, cos and sin (seqlen, rotary_dim / 2) or
    (batch, seqlen, rotary_dim / 2)."""
    return rotated(x, cos, sin, interleaved, False)


def apply_rotary_emb_qkv_(
    qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None
):
    """Rotates q and k in qkv (batch, seqlen, 3, heads, dim), or (batch, seqlen, heads, dim) with
    `num_heads_q`, in place."""
    cos_k, sin_k = (cos if cos_k is None else cos_k), (sin if sin_k is None else sin_k)

    def turn(qkv, conjugate):
        if qkv.dim() == 5:
            q, k = qkv[:, :, 0], qkv[:, :, 1]
        else:
            heads_k = (qkv.shape[2] - num_heads_q) // 2
            q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_k]
        for x, tables in ((q, (cos, sin)), (k, (cos_k, sin_k))):
            apply_rotary(x, *tables, seqlen_offsets, None, None, interleaved, True, conjugate)

    return _in_place(qkv, turn)


def apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0):
    """Rotates k in kv (batch, seqlen, 2, heads, dim), in place."""

    def turn(kv, conjugate):
        apply_rotary(kv[:, :, 0], cos, sin, seqlen_offsets, None, None, interleaved, True, conjugate)

    return _in_place(kv, turn)


class ApplyRotaryEmb:
    """`apply_rotary_emb` as programs call it that take it for autograd's, by the order of its arguments."""

    apply = staticmethod(apply_rotary_emb)


class ApplyRotaryEmbQKV_:
    """`apply_rotary_emb_qkv_`, likewise."""

    apply = staticmethod(apply_rotary_emb_qkv_)


class ApplyRotaryEmbKV_:
    """`apply_rotary_emb_kv_`, likewise."""

    apply = staticmethod(apply_rotary_emb_kv_)


class RotaryEmbedding(torch.nn.Module):
    """Rotates q and k by their positions, with tables of cosines and sines that grow as sequences do. With
    `scale_base` keys and queries are scaled by their distance from the middle (XPos)."""

    def __init__(
        self, dim, base=10000.0, interleaved=False, scale_base=None, pos_idx_in_fp32=True, device=None
    ):
        super().__init__()
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        self.scale_base, self.pos_idx_in_fp32 = scale_base, pos_idx_in_fp32
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None
        if scale_base is not None:
            scale = (torch.arange(0, dim, 2, device=device, dtype=torch.float32) + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        # Programs make tables for all positions, then read them by these names; those of keys are XPos's.
        self._seq_len_cached = 0
        self._cos_cached = self._sin_cached = self._cos_k_cached = self._sin_k_cached = None

    def _compute_inv_freq(self, device=None):
        return self.base ** (-torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _update_cos_sin_cache(self, seqlen, device=None, dtype=None):
        """Makes the tables of so many positions, unless there are as many of this device and type. `device`:
        None for that of `inv_freq`. `dtype`: None for float32."""
        device = self.inv_freq.device if device is None else torch.device(device)
        dtype, old = torch.float32 if dtype is None else dtype, self._cos_cached
        fits = (
            seqlen <= self._seq_len_cached and old is not None and (old.device, old.dtype) == (device, dtype)
        )
        if fits and not (self.training and old.is_inference()):
            return
        frequencies = self.inv_freq.to(device)
        if self.pos_idx_in_fp32 and frequencies.dtype != torch.float32:
            # Those of a model in 16 bits are rounded.
            frequencies = self._compute_inv_freq(device)
        places = torch.arange(seqlen, device=device, dtype=frequencies.dtype)
        angles = torch.outer(places, frequencies)
        cos, sin = torch.cos(angles), torch.sin(angles)
        self._seq_len_cached = seqlen
        if self.scale is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        power = (places - seqlen // 2) / self.scale_base
        scale = self.scale.to(device, power.dtype) ** power[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None):
        """Rotates qkv (batch, seqlen, 3, heads, dim), or (batch, seqlen, heads, dim) with `num_heads_q`; or q
        (batch, seqlen, heads, dim) and k of kv (batch, seqlen, 2, heads, dim), of which both are returned.
        `seqlen_offset`: an int, or one for each sequence, with max_seqlen the most positions."""
        length = max_seqlen
        if length is None:
            furthest = int(seqlen_offset.max()) if isinstance(seqlen_offset, torch.Tensor) else seqlen_offset
            length = qkv.shape[1] + furthest
        self._update_cos_sin_cache(length, qkv.device, qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        keys = (cos, sin) if self.scale is None else (self._cos_k_cached, self._sin_k_cached)
        turned = dict(interleaved=self.interleaved, seqlen_offsets=seqlen_offset)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, *keys, num_heads_q=num_heads_q, **turned)
        q = apply_rotary_emb(qkv, cos, sin, inplace=True, **turned)
        return q, apply_rotary_emb_kv_(kv, *keys, **turned)
