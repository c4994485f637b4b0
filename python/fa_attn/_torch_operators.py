"""The operators `fa_attn::forward`, `fa_attn::backward` and `fa_attn::append`: what torch.compile, fake
tensors, torch.func and subclasses see. Options are flat: the sides of a window and each of the extra tensors
are arguments of their own."""

import torch
from torch.autograd import forward_ad

from ._core import InputError, UnsupportedError
from ._options import NO_EXTRAS, TENSORS, Extras, division_of
from ._torch_caches import run_append
from ._torch_memory import (
    FLOAT,
    check_tensor,
    detached,
    is_compiling,
    lse_shape,
    needs_rules,
    new_gradients,
    new_out,
    rows_of,
)
from ._torch_passes import no_tangents, run_backward, run_forward
from ._torch_schemas import EXTRAS, OPTIONS, extras_of, flat, options_of, schema, tensors
from ._torch_shardings import distributed


def _read(extras):
    """An operator's extras as the passes take them."""
    return None if all(x is None for x in extras[:-2]) else detached(extras)


def _forward(q, k, v, *arguments):
    extras, arguments = extras_of(arguments)
    options, parts = options_of(arguments)
    q, k, v = (rows_of(x.detach()) for x in (q, k, v))
    # Torch leaves out arguments that have their defaults.
    division = division_of(*parts, *(0, None)[len(parts) :])
    return run_forward(q, k, v, options, _read(extras), division=division)


_forward_operator = torch.library.custom_op(
    "fa_attn::forward",
    _forward,
    mutates_args=(),
    schema=schema(
        tensors("q", "k", "v"), EXTRAS, OPTIONS, "SymInt num_splits=0", "bool? pack_gqa=None", results=2
    ),
)


@_forward_operator.register_fake
def _(q, k, v, *arguments):
    options = options_of(extras_of(arguments)[1])[0]
    return new_out(q, v, options), q.new_empty(lse_shape(q), dtype=FLOAT)


def _backward(dout, q, k, v, out, lse, dlse, *arguments):
    extras, arguments = extras_of(arguments)
    dout, q, k, v, out, lse = (x.detach() for x in (dout, q, k, v, out, lse))
    q, k, v, extras = rows_of(q), rows_of(k), rows_of(v), _read(extras)
    grads = new_gradients(q, k, v, extras)
    dsinks = run_backward(dout, q, k, v, out, lse, grads, options_of(arguments)[0], extras, dlse)
    return (*grads, q.new_empty((0,), dtype=FLOAT) if dsinks is None else dsinks)


_backward_operator = torch.library.custom_op(
    "fa_attn::backward",
    _backward,
    mutates_args=(),
    schema=schema(tensors("dout", "q", "k", "v", "out", "lse", "dlse?"), EXTRAS, OPTIONS, results=4),
)


@_backward_operator.register_fake
def _(dout, q, k, v, out, lse, dlse, *arguments):
    sinks = extras_of(arguments)[0].sinks
    dsinks = q.new_empty(q.shape[-2:-1] if sinks is not None else (0,), dtype=FLOAT)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def by_operator(q, k, v, options, extras, division=None):
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x)
        if x.device != q.device:
            raise InputError(f"{name} is on {x.device} and q on {q.device}: move it there")
    extras = NO_EXTRAS if extras is None else extras
    if extras.sinks is not None and extras.sinks.dtype != FLOAT:
        extras = extras._replace(sinks=extras.sinks.to(FLOAT))
    others = distributed(dict(q=q, k=k, v=v), extras[:-2])
    splits, packs = division or (None, None)
    operator = torch.ops.fa_attn.forward
    if needs_rules() or (not is_compiling() and forward_ad._current_level >= 0):
        operator = _transformed
    splits = 0 if splits is None else splits
    return operator(q, k, v, *others, *extras[-2:], *flat(options), splits, packs)


_ARGUMENTS = len(_forward_operator._opoverload._schema.arguments)


def _setup(ctx, inputs, output):
    q, k, v, *arguments = inputs
    extras, options = extras_of(arguments)
    ctx.bounds, ctx.options = extras[-2:], options[:-2]
    ctx.save_for_backward(q, k, v, *output, *extras[:-2])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse):
    if dout is None and dlse is None:
        return (None,) * _ARGUMENTS
    q, k, v, out, lse, *extras = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    operator = torch.ops.fa_attn.backward
    if needs_rules():
        operator = _transformed_backward
    dq, dk, dv, dsinks = operator(dout, q, k, v, out, lse, dlse, *extras, *ctx.bounds, *ctx.options)
    has_sinks = extras[TENSORS.index("sinks")] is not None
    of_extras = Extras(sinks=dsinks if has_sinks else None, max_seqlen_q=None, max_seqlen_k=None)
    return (dq, dk, dv, *of_extras, *(None,) * (_ARGUMENTS - 3 - len(of_extras)))


_forward_operator.register_autograd(_differentiate, setup_context=_setup)


def refused_twice(ctx, *gradients):
    """The derivative of a backward."""
    raise UnsupportedError("second derivatives: gradients are differentiated no further, detach them")


_backward_operator.register_autograd(refused_twice)


def one_by_one(operator):
    """An operator under vmap: a call for each element."""

    def rule(info, in_dims, *arguments):
        def at(index):
            given = zip(arguments, in_dims)
            # Of a list of numbers the axes are a list.
            return operator(*(x.select(axis, index) if type(axis) is int else x for x, axis in given))

        if info.batch_size == 0:
            # One element's results have the shapes.
            none = zip(arguments, in_dims)
            like = operator(
                *(x.new_zeros(x.movedim(axis, 0).shape[1:]) if type(axis) is int else x for x, axis in none)
            )
            return tuple(x.new_empty((0, *x.shape)) for x in like), (0,) * len(like)
        results = list(zip(*map(at, range(info.batch_size))))
        return tuple(map(torch.stack, results)), (0,) * len(results)

    return rule


def within_func(operator, derivative, setup=None):
    """An operator within torch.func, which does not differentiate operators written in Python."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*arguments):
            return operator(*arguments)

        setup_context = staticmethod(setup or (lambda ctx, inputs, output: None))
        backward = staticmethod(derivative)
        jvp = staticmethod(no_tangents)

        @staticmethod
        def vmap(info, in_dims, *arguments):
            return one_by_one(Function.apply)(info, in_dims, *arguments)

    return Function.apply


_transformed = within_func(torch.ops.fa_attn.forward, _differentiate, _setup)
_transformed_backward = within_func(torch.ops.fa_attn.backward, refused_twice)


for _operator in (_forward_operator, _backward_operator):
    # torch 2.5 and newer.
    if hasattr(_operator, "register_vmap"):
        _operator.register_vmap(one_by_one(_operator))


_append_operator = torch.library.custom_op(
    "fa_attn::append",
    run_append,
    mutates_args=("k_cache", "v_cache", "k_descale", "v_descale"),
    schema=schema(
        tensors("k", "v") + ", Tensor(a!) k_cache, Tensor(b!) v_cache, " + tensors("q", "cos?", "sin?"),
        "bool interleaved, bool causal, SymInt left, SymInt right",
        "Tensor? cu_new, SymInt max_new",
        tensors("seqused_k", "page_table?", "cu_seqlens_q?"),
        "SymInt max_seqlen_q",
        "Tensor(c!)? k_descale, Tensor(d!)? v_descale, str? kv_dtype=None",
        results=2,
    ),
)


@_append_operator.register_fake
def _(
    k, v, k_cache, v_cache, q, cos, sin, interleaved, causal, left, right, cu_new, max_new, seqused_k, *others
):
    return q.new_empty((0,) if cos is None else q.shape), torch.empty_like(seqused_k)
