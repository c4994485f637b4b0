"""The operators `fa_attn::forward`, `fa_attn::backward` and `fa_attn::append`: what torch.compile, fake
tensors, torch.func and subclasses see. Options are flat: the sides of a window and each of the extra tensors
are arguments of their own."""

from typing import Optional, Tuple

import torch
from torch.autograd import forward_ad

from ._core import InputError, UnsupportedError
from ._options import division_of
from ._torch_caches import run_append
from ._torch_flops import count_operations
from ._torch_memory import (
    FLOAT,
    check_tensor,
    detached,
    is_compiling,
    is_transforming,
    lse_shape,
    out_shape,
    room_for_gradients,
    rows_of,
)
from ._torch_shardings import distributed
from ._torch_passes import beside_of, no_tangents, run_backward, run_forward


@torch.library.custom_op("fa_attn::forward", mutates_args=())
def _forward_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: Optional[torch.Tensor],
    cu_k: Optional[torch.Tensor],
    used_q: Optional[torch.Tensor],
    used_k: Optional[torch.Tensor],
    page_table: Optional[torch.Tensor],
    alibi_slopes: Optional[torch.Tensor],
    sinks: Optional[torch.Tensor],
    max_q: int,
    max_k: int,
    scale: Optional[float],
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
    num_splits: int = 0,
    pack_gqa: Optional[bool] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    del deterministic
    extras = _flat(cu_q, cu_k, used_q, used_k, page_table, alibi_slopes, sinks, max_q, max_k)
    q, k, v = (rows_of(x.detach()) for x in (q, k, v))
    division = division_of(num_splits, pack_gqa)
    return run_forward(q, k, v, scale, causal, (left, right), softcap, extras, division=division)


@_forward_operator.register_fake
def _(q, k, v, cu_q, cu_k, used_q, used_k, page_table, alibi_slopes, sinks, max_q, max_k, scale, *options):
    return q.new_empty(out_shape(q, v)), q.new_empty(lse_shape(q), dtype=FLOAT)


@torch.library.custom_op("fa_attn::backward", mutates_args=())
def _backward_operator(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: Optional[torch.Tensor],
    cu_q: Optional[torch.Tensor],
    cu_k: Optional[torch.Tensor],
    used_q: Optional[torch.Tensor],
    used_k: Optional[torch.Tensor],
    alibi_slopes: Optional[torch.Tensor],
    sinks: Optional[torch.Tensor],
    max_q: int,
    max_k: int,
    scale: Optional[float],
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    extras = _flat(cu_q, cu_k, used_q, used_k, None, alibi_slopes, sinks, max_q, max_k)
    dout, q, k, v, out, lse = (x.detach() for x in (dout, q, k, v, out, lse))
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    grads = room_for_gradients(q, k, v, extras)
    window = (left, right)
    dsinks = run_backward(
        dout, q, k, v, out, lse, grads, scale, causal, window, softcap, deterministic, extras, dlse
    )
    return (*grads, q.new_empty((0,), dtype=FLOAT) if dsinks is None else dsinks)


@_backward_operator.register_fake
def _(dout, q, k, v, out, lse, dlse, cu_q, cu_k, used_q, used_k, alibi_slopes, sinks, *options):
    dsinks = q.new_empty(q.shape[-2:-1] if sinks is not None else (0,), dtype=FLOAT)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _flat(*extras):
    return None if all(x is None for x in extras[:7]) else detached(extras)


def by_operator(q, k, v, scale, causal, window, softcap, deterministic, extras, division=None):
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x)
        if x.device != q.device:
            raise InputError(f"{name} is on {x.device} and q on {q.device}: move it there")
    cu_q, cu_k, used_q, used_k, table, slopes, sinks, max_q, max_k = beside_of(extras)
    if sinks is not None and sinks.dtype != FLOAT:
        sinks = sinks.to(FLOAT)
    left, right = window
    beside = cu_q, cu_k, used_q, used_k, table, slopes, sinks
    cu_q, cu_k, used_q, used_k, table, slopes, sinks = distributed(dict(q=q, k=k, v=v), beside)
    splits, packs = division or (None, None)
    operator = torch.ops.fa_attn.forward
    if not is_compiling() and (is_transforming() or forward_ad._current_level >= 0):
        operator = _Transformed.apply
    return operator(
        q,
        k,
        v,
        cu_q,
        cu_k,
        used_q,
        used_k,
        table,
        slopes,
        sinks,
        max_q,
        max_k,
        scale,
        bool(causal),
        left,
        right,
        softcap,
        bool(deterministic),
        0 if splits is None else splits,
        packs,
    )


def _setup(ctx, inputs, output):
    q, k, v, cu_q, cu_k, used_q, used_k, page_table, slopes, sinks, *options, _, _ = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, used_q, used_k, slopes, sinks)
    ctx.is_paged, ctx.options = page_table is not None, options
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse):
    if ctx.is_paged:
        raise UnsupportedError("keys in pages have no gradients: pack or pad them")
    if dout is None and dlse is None:
        return (None,) * 20
    q, k, v, out, lse, cu_q, cu_k, used_q, used_k, slopes, sinks = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    operator = torch.ops.fa_attn.backward
    if not is_compiling() and is_transforming():
        operator = _TransformedBackward.apply
    dq, dk, dv, dsinks = operator(
        dout, q, k, v, out, lse, dlse, cu_q, cu_k, used_q, used_k, slopes, sinks, *ctx.options
    )
    return (dq, dk, dv, *(None,) * 6, None if sinks is None else dsinks, *(None,) * 10)


_forward_operator.register_autograd(_differentiate, setup_context=_setup)


class _TransformedBackward(torch.autograd.Function):
    """The backward operator within torch.func."""

    @staticmethod
    def forward(*arguments):
        return torch.ops.fa_attn.backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise UnsupportedError("second derivatives: gradients are differentiated no further, detach them")

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _one_by_one(_TransformedBackward.apply)(info, in_dims, *arguments)


class _Transformed(torch.autograd.Function):
    """The forward operator within torch.func, which does not differentiate operators written in Python."""

    @staticmethod
    def forward(*arguments):
        return torch.ops.fa_attn.forward(*arguments)

    setup_context = staticmethod(_setup)
    backward = staticmethod(_differentiate)
    jvp = staticmethod(no_tangents)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _one_by_one(_Transformed.apply)(info, in_dims, *arguments)


def _one_by_one(operator):
    """An operator under vmap: a call for each element."""

    def rule(info, in_dims, *arguments):
        def at(index):
            given = zip(arguments, in_dims)
            return operator(*(x if axis is None else x.select(axis, index) for x, axis in given))

        if info.batch_size == 0:
            # One element's results have the shapes.
            none = zip(arguments, in_dims)
            like = operator(
                *(x if axis is None else x.new_zeros(x.movedim(axis, 0).shape[1:]) for x, axis in none)
            )
            return tuple(x.new_empty((0, *x.shape)) for x in like), (0,) * len(like)
        results = list(zip(*map(at, range(info.batch_size))))
        return tuple(map(torch.stack, results)), (0,) * len(results)

    return rule


count_operations()

for _operator in (_forward_operator, _backward_operator):
    # torch 2.5 and newer.
    if hasattr(_operator, "register_vmap"):
        _operator.register_vmap(_one_by_one(_operator))


@torch.library.custom_op("fa_attn::append", mutates_args=("k_cache", "v_cache"))
def _append_operator(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q: torch.Tensor,
    cos: Optional[torch.Tensor],
    sin: Optional[torch.Tensor],
    interleaved: bool,
    causal: bool,
    left: int,
    right: int,
    cu_new: Optional[torch.Tensor],
    max_new: int,
    used_k: torch.Tensor,
    page_table: Optional[torch.Tensor],
    cu_q: Optional[torch.Tensor],
    max_q: int,
) -> Tuple[torch.Tensor, torch.Tensor]:
    arguments = (k, v, k_cache, v_cache, q, cos, sin, interleaved, causal, left, right)
    return run_append(*arguments, cu_new, max_new, used_k, page_table, cu_q, max_q)


@_append_operator.register_fake
def _(
    k,
    v,
    k_cache,
    v_cache,
    q,
    cos,
    sin,
    interleaved,
    causal,
    left,
    right,
    cu_new,
    max_new,
    used_k,
    *others,
):
    return q.new_empty((0,) if cos is None else q.shape), torch.empty_like(used_k)
