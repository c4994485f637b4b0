"""Stands in for flash_attn.flash_attn_interface; with it the functions below FlashAttention-2's own autograd,
which ring attention and other parallel schemes call: forward and backward of a part of the keys."""

import inspect

import flash_attn_2_cuda as flash_attn_gpu  # noqa: F401
import torch

import fa_attn
from fa_attn import UnsupportedError

from . import *  # noqa: F403
from . import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

USE_TRITON_ROCM = False


def _autograd_function(name, function, takes_pages=False):
    """A class whose `apply` takes a function's arguments by their order, but for those of this package's own, then
    whether gradients are wanted."""
    last = "block_table" if takes_pages else "return_attn_probs"
    count = list(inspect.signature(function).parameters).index(last) + 1

    def apply(*given):
        with torch.set_grad_enabled(torch.is_grad_enabled() and all(given[count:])):
            return function(*given[:count])

    return type(name, (), {"apply": staticmethod(apply), "__doc__": f"`{function.__name__}` by its `apply`."})


FlashAttnFunc = _autograd_function("FlashAttnFunc", flash_attn_func)
FlashAttnKVPackedFunc = _autograd_function("FlashAttnKVPackedFunc", flash_attn_kvpacked_func)
FlashAttnQKVPackedFunc = _autograd_function("FlashAttnQKVPackedFunc", flash_attn_qkvpacked_func)
FlashAttnVarlenFunc = _autograd_function("FlashAttnVarlenFunc", flash_attn_varlen_func, True)
FlashAttnVarlenKVPackedFunc = _autograd_function(
    "FlashAttnVarlenKVPackedFunc", flash_attn_varlen_kvpacked_func
)
FlashAttnVarlenQKVPackedFunc = _autograd_function(
    "FlashAttnVarlenQKVPackedFunc", flash_attn_varlen_qkvpacked_func
)


def maybe_contiguous(x):
    """A copy of a tensor whose rows are not contiguous; any other as it is."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def round_multiple(x, m):
    """The least multiple of `m` that is no less than `x`."""
    return (x + m - 1) // m * m


def _get_block_size_n(device, head_dim, is_dropout, is_causal):
    """The tile size by which probabilities with dropout are laid out."""
    raise UnsupportedError("dropout: weights are never written")


def _results(q, out, lse):
    """The results, with probabilities that nothing writes and a generator's state that nothing reads."""
    weights = torch.empty((0,), dtype=q.dtype, device=q.device)
    return out, lse, weights, torch.zeros((2,), dtype=torch.int64, device=q.device)


def _flash_attn_forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
):
    """(out, softmax_lse, probabilities, state of the generator), without autograd."""
    fa_attn._checks.no_dropout(dropout_p)
    with torch.no_grad():
        out, lse = fa_attn.flash_attn_func(
            q,
            k,
            v,
            dropout_p,
            softmax_scale,
            causal,
            (window_size_left, window_size_right),
            softcap,
            alibi_slopes,
            return_softmax_lse=True,
        )
    return _results(q, out, lse)


def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    zero_tensors=False,
    num_splits=0,
):
    """The same of packed sequences."""
    fa_attn._checks.no_dropout(dropout_p)
    if leftpad_k is not None:
        raise UnsupportedError("leftpad_k: give it to flash_attn_with_kvcache as cache_leftpad")
    with torch.no_grad():
        out, lse = fa_attn.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p,
            softmax_scale,
            causal,
            (window_size_left, window_size_right),
            softcap,
            alibi_slopes,
            block_table=block_table,
            seqused_k=seqused_k,
            num_splits=num_splits,
            return_softmax_lse=True,
        )
    return _results(q, out, lse)


def _written(grads, rooms, dout, out):
    """Writes the gradients to the caller's tensors; returns rowsum(O * dO), (..., heads, rows)."""
    for grad, room in zip(grads, rooms):
        if room is not None:
            room.copy_(grad)
    return (out.float() * dout.float()).sum(-1).transpose(-1, -2)


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    rng_state=None,
):
    """Writes dq, dk and dv; `out` and `softmax_lse` may be results over more keys than `k` and `v` hold."""
    fa_attn._checks.no_dropout(dropout_p)
    window = (window_size_left, window_size_right)
    options = (softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    grads = fa_attn.flash_attn_backward(dout, q, k, v, out, softmax_lse, *options)
    return _written(grads, (dq, dk, dv), dout, out)


def _flash_attn_varlen_backward(
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
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    rng_state=None,
    zero_tensors=False,
):
    """The same of packed sequences."""
    fa_attn._checks.no_dropout(dropout_p)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = (window_size_left, window_size_right)
    options = (softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    grads = fa_attn.flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, *lengths, *options)
    return _written(grads, (dq, dk, dv), dout, out)


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
