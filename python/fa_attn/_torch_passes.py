"""Both passes on plain tensors, with gradients by `torch.autograd.Function`."""

from __future__ import annotations

from functools import wraps

import torch

from . import _core
from ._options import NO_EXTRAS, Extras, call_options, is_varied
from ._torch_direct import DirectGradients
from ._torch_memory import (
    FLOAT,
    aligned,
    allocate,
    is_batch,
    is_recorded,
    is_transforming,
    new_gradients,
    new_results,
    stream_of,
    words_of,
)
from ._torch_paged import are_paged, gradients_of_pages
from ._torch_schemas import flat
from ._torch_shardings import distributed
from ._torch_wide import is_wide, wide_gradients

_empty = torch.empty


def run_forward(q, k, v, options, extras, plans=None, out=None, division=None, wants_lse=True, programs=None):
    """(out, lse); `out`: the tensor that out is written to; `division`: how the caller wants the work
    divided. Where LSE is not wanted it may be None. `programs`: as the extension module takes them."""
    has_gaps = extras is not None and (
        extras.seqused_q is not None or (extras.cu_seqlens_q is not None and not q.is_cuda)
    )
    out, lse = new_results(q, v, has_gaps, options, out, wants_lse)
    on = (stream_of(q), allocate, plans, division, programs)
    try:
        _core.forward(q, k, v, out, lse, options, extras, *on)
    except _core.UnsupportedError:
        # Of what kernels of 8 bits do not compute those of 16 do, beside k and v in codes.
        if options.out_dtype is None or not q.is_cuda:
            raise
        wider = in_16_bits(q, options, extras)
        if wider is None:
            raise
        q, options, extras = wider
        _core.forward(q, k, v, out, lse, options, extras, *on)
    return out, lse


def in_16_bits(q, options, extras):
    """(q, options, extras) with a q of e4m3 codes as bfloat16, which holds the number of each, and its descale
    in that of k; None where descales of sequences would join those of rows that are packed or in pages."""
    q = q.view(torch.float8_e4m3fn).to(torch.bfloat16)
    options = options._replace(out_dtype=None)
    own = None if extras is None else extras.q_descale
    if own is None:
        return q, options, extras
    of_k = extras.k_descale
    if of_k is not None:
        if own.dim() == of_k.dim() == 2 and own.shape[0] != of_k.shape[0]:
            return None
        if own.dim() == 2 and of_k.dim() == 3:
            if extras.page_table is not None:
                return None
            own = own[:, None]
        own = own * of_k
    return q, options, extras._replace(q_descale=None, k_descale=own.contiguous())


def run_backward(dout, q, k, v, out, lse, grads, options, extras, dlse=None, programs=None, gradients=None):
    """Writes the gradients to `grads`, and those of the programs' arrays to `gradients`; returns that of the
    sinks, or None."""
    if are_paged(extras):
        arrays = (dout, q, k, v, out, lse, grads)
        return gradients_of_pages(run_backward, *arrays, options, extras, dlse, programs, gradients)
    dout = torch.zeros_like(out) if dout is None else aligned(dout)
    lse = words_of(lse)
    dlse = None if dlse is None else words_of(dlse)
    if dlse is not None and dlse.shape != lse.shape:
        raise _core.InputError(
            f"dlse has the shape {tuple(dlse.shape)}: it must be that of softmax_lse, {tuple(lse.shape)}"
        )
    dsinks = None
    if extras is not None and extras.sinks is not None:
        dsinks = _empty(extras.sinks.shape, dtype=FLOAT, device=q.device)
    if is_wide(q, v, options):
        arrays = (dout, q, k, v, out, lse, grads)
        return wide_gradients(*arrays, options, extras, dlse, programs, gradients)
    direct = None
    if gradients and has_kernels(q):
        direct = DirectGradients.of(q, k, options, extras, programs, gradients)
        if direct is not None:
            programs, gradients = direct.programs, direct.gradients
    arrays = (dout, q, k, v, out, lse, *grads, dsinks)
    _core.backward(*arrays, options, extras, stream_of(q), allocate, dlse, programs, gradients)
    if direct is not None:
        direct.add_up()
    return dsinks


def has_kernels(q):
    """Whether kernels compute a call, which sum gradients of arrays with an element for each place alone."""
    return q.is_cuda


def backward_by_operator(dout, q, k, v, out, lse, dlse, options, extras):
    """(dq, dk, dv, dsinks or None) by the operator, for code that records operators; without autograd."""
    extras = NO_EXTRAS if extras is None else extras
    dout = torch.zeros_like(out) if dout is None else dout
    named = dict(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse)
    others = distributed(named, (dlse, *extras[:-2]))
    given = (*named.values(), *others)
    # Of a gradient that stands for many torch makes no views.
    tensors = (x.detach() if x is not None and x.requires_grad else x for x in given)
    dq, dk, dv, dsinks = torch.ops.fa_attn.backward(*tensors, *extras[-2:], *flat(options))
    return dq, dk, dv, None if extras.sinks is None else dsinks


class _Final(torch.autograd.Function):
    """The first `count` tensors unchanged, made dependent on all others and without gradients."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx, *gradients):
        raise _core.UnsupportedError(
            "second derivatives: gradients are differentiated no further, detach them"
        )


def no_tangents(ctx, *tangents):
    """The forward mode of a function that has none: an error."""
    raise _core.UnsupportedError(
        "forward-mode derivatives are not computed: use reverse mode (backward, torch.autograd.grad, "
        "torch.func.vjp, jacrev)"
    )


def once_only(backward):
    """A backward whose gradients raise an error where they are differentiated. `once_differentiable` treats
    them as constants where `dout` is one, though they depend on q, k and v."""

    @wraps(backward)
    def run(ctx, *gradients):
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        with torch.no_grad():
            made = backward(ctx, *gradients)
        tensors = [x for x in made if isinstance(x, torch.Tensor)]
        sources = [x for x in (*gradients, *ctx.saved_tensors) if x is not None and x.requires_grad]
        final = iter(_Final.apply(len(tensors), *tensors, *sources) if tensors else ())
        return tuple(next(final) if isinstance(x, torch.Tensor) else x for x in made)

    return run


def is_by_operator(*gradients):
    """Whether something records a backward, or a gradient stands for many (within `torch.vmap`, and by
    `is_grads_batched`, of which torch has a kind of its own), for each of which an operator is called."""
    return is_recorded() or is_transforming() or any(x is not None and is_batch(x) for x in gradients)


def wanted_gradients(ctx, q, k, v, extras):
    """Where the gradients of a function's first inputs q, k and v go."""
    if are_paged(extras) and not any(ctx.needs_input_grad[1:3]):
        # A cache that is only read has none, whatever its size.
        return torch.zeros_like(q), None, None
    return new_gradients(q, k, v, extras)


def save(ctx, extras, *tensors):
    """Saves what the backward reads; the extra tensors too, so that autograd notices if one is written in
    between."""
    ctx.places, saved = (), ()
    if extras is not None:
        # Lengths may be arrays of another library, or made in inference mode.
        ctx.places = [
            at for at, x in enumerate(extras) if isinstance(x, torch.Tensor) and not x.is_inference()
        ]
        saved = [extras[at] for at in ctx.places]
        extras = [None if at in ctx.places else x for at, x in enumerate(extras)]
    ctx.extras = extras
    ctx.save_for_backward(*tensors, *saved)


def saved_of(ctx):
    """(tensors, extras) that `save` saved."""
    saved = ctx.saved_tensors
    if ctx.extras is None:
        return saved, None
    count, extras = len(saved) - len(ctx.places), list(ctx.extras)
    for at, tensor in zip(ctx.places, saved[count:]):
        extras[at] = tensor
    return saved[:count], Extras(*extras)


class Attention(torch.autograd.Function):
    """out and LSE from q, k, v and sinks, with gradients."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, options, extras, division):
        out, lse = run_forward(q, k, v, options, extras, division=division)
        save(ctx, extras, q, k, v, out, lse)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_only
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 7
        (q, k, v, out, lse), extras = saved_of(ctx)
        if is_by_operator(dout, dlse):
            *grads, dsinks = backward_by_operator(dout, q, k, v, out, lse, dlse, ctx.options, extras)
            return (*grads, dsinks, *(None,) * 3)
        grads = wanted_gradients(ctx, q, k, v, extras)
        dsinks = run_backward(dout, q, k, v, out, lse, grads, ctx.options, extras, dlse)
        return (*grads, dsinks, *(None,) * 3)


class PlainAttention(Attention):
    """The same of a call that the extension module has read: `plain` computes it from `call`, of which the
    first are the numbers."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, plain, call, extras):
        made = plain(q, k, v, *call)
        if made is None:
            raise _core.UnsupportedError("a call that takes the long way")
        save(ctx, extras, q, k, v, *made)
        ctx.options = call_options(*call[0])
        ctx.set_materialize_grads(False)
        return made


class PackedAttention(torch.autograd.Function):
    """The same with q, k and v in one tensor, whose gradients are written to one tensor."""

    @staticmethod
    def forward(ctx, qkv, axis, sinks, options, extras, division):
        q, k, v = qkv.unbind(axis)
        out, lse = run_forward(q, k, v, options, extras, division=division)
        save(ctx, extras, qkv, out, lse)
        ctx.options, ctx.axis = options, axis
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_only
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 6
        (qkv, out, lse), extras = saved_of(ctx)
        if is_by_operator(dout, dlse):
            q, k, v = qkv.unbind(ctx.axis)
            *grads, dsinks = backward_by_operator(dout, q, k, v, out, lse, dlse, ctx.options, extras)
            return (torch.stack(grads, ctx.axis), None, dsinks, *(None,) * 3)
        make = torch.zeros if is_varied(extras) else torch.empty
        dqkv = make(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        q, k, v = qkv.unbind(ctx.axis)
        dsinks = run_backward(dout, q, k, v, out, lse, dqkv.unbind(ctx.axis), ctx.options, extras, dlse)
        return (dqkv, None, dsinks, *(None,) * 3)


class CodesWithoutGradients(torch.autograd.Function):
    """out and LSE of codes, unchanged."""

    @staticmethod
    def forward(ctx, out, lse, *tensors):
        return out.view_as(out), None if lse is None else lse.view_as(lse)

    @staticmethod
    def backward(ctx, *gradients):
        raise _core.UnsupportedError(
            "k and v in codes: there are no gradients, give q, k and v of 16 bits to flash_attn_backward "
            "with this out and LSE, or call under torch.no_grad()"
        )
