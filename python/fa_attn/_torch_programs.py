"""The operators `fa_attn::forward_program` and `fa_attn::backward_program`: attention with programs of the
caller's, which are texts, with lists of the arrays and scalars that they read. All such calls go by them."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from ._core import InputError, UnsupportedError
from ._modifications import Modifications
from ._options import NO_EXTRAS, TENSORS, Extras, division_of
from ._torch_flops import count_operations
from ._torch_memory import (
    FLOAT,
    check_tensor,
    detached,
    is_transforming,
    lse_shape,
    new_gradients,
    out_shape,
    rows_of,
)
from ._torch_passes import run_backward, run_forward
from ._torch_schemas import EXTRAS, OPTIONS, extras_of, flat, options_of, schema, tensors

_PROGRAM = "Tensor[] arrays, str[] names, str[] texts, str[] scalar_names, float[] scalars"
_PROGRAM_ARGUMENTS = 5


def _programs(arrays, names, texts, scalar_names, scalars):
    """As the extension module takes them."""
    arrays = [x.detach().resolve_neg() for x in arrays]
    return list(texts), list(zip(names, arrays)), list(zip(scalar_names, scalars))


def _read(extras):
    return None if all(x is None for x in extras[:-2]) else detached(extras)


def _forward(q, k, v, *arguments):
    programs, arguments = arguments[:_PROGRAM_ARGUMENTS], arguments[_PROGRAM_ARGUMENTS:]
    extras, arguments = extras_of(arguments)
    options, parts = options_of(arguments)
    q, k, v = (rows_of(x.detach()) for x in (q, k, v))
    division = division_of(*parts, *(0, None)[len(parts) :])
    return run_forward(
        q, k, v, options, _read(extras), division=division, programs=_programs(*programs)
    )


_forward_operator = torch.library.custom_op(
    "fa_attn::forward_program",
    _forward,
    mutates_args=(),
    schema=schema(
        tensors("q", "k", "v"),
        _PROGRAM,
        EXTRAS,
        OPTIONS,
        "SymInt num_splits=0",
        "bool? pack_gqa=None",
        results=2,
    ),
)


@_forward_operator.register_fake
def _(q, k, v, *arguments):
    return q.new_empty(out_shape(q, v)), q.new_empty(lse_shape(q), dtype=FLOAT)


def _room(arrays, wants, make):
    """Where the gradients of arrays go, without elements for those that want none."""
    shapes = [x.shape if wanted else (0,) for x, wanted in zip(arrays, wants)]
    return [make(shape, dtype=FLOAT, device=x.device) for shape, x in zip(shapes, arrays)]


def _backward(dout, q, k, v, out, lse, dlse, wants, *arguments):
    programs, arguments = arguments[:_PROGRAM_ARGUMENTS], arguments[_PROGRAM_ARGUMENTS:]
    extras, arguments = extras_of(arguments)
    dout, q, k, v, out, lse = (x.detach() for x in (dout, q, k, v, out, lse))
    q, k, v, extras = rows_of(q), rows_of(k), rows_of(v), _read(extras)
    grads = new_gradients(q, k, v, extras)
    arrays, names = programs[:2]
    made = _room(arrays, wants, torch.empty)
    own = [(name, x) for name, x, wanted in zip(names, made, wants) if wanted]
    dsinks = run_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        grads,
        options_of(arguments)[0],
        extras,
        dlse,
        programs=_programs(*programs),
        gradients=own,
    )
    return (*grads, q.new_empty((0,), dtype=FLOAT) if dsinks is None else dsinks, made)


_backward_operator = torch.library.custom_op(
    "fa_attn::backward_program",
    _backward,
    mutates_args=(),
    schema="("
    + ", ".join(
        [tensors("dout", "q", "k", "v", "out", "lse", "dlse?"), "bool[] wants", _PROGRAM, EXTRAS, OPTIONS]
    )
    + ") -> (Tensor, Tensor, Tensor, Tensor, Tensor[])",
)


@_backward_operator.register_fake
def _(dout, q, k, v, out, lse, dlse, wants, *arguments):
    sinks = extras_of(arguments[_PROGRAM_ARGUMENTS:])[0].sinks
    dsinks = q.new_empty(q.shape[-2:-1] if sinks is not None else (0,), dtype=FLOAT)
    made = _room(arguments[0], wants, torch.empty)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks, made


_ARGUMENTS = len(_forward_operator._opoverload._schema.arguments)


def _setup(ctx, inputs, output):
    q, k, v, arrays, *others = inputs
    ctx.programs, others = others[: _PROGRAM_ARGUMENTS - 1], others[_PROGRAM_ARGUMENTS - 1 :]
    extras, options = extras_of(others)
    ctx.is_paged, ctx.bounds, ctx.options = extras.page_table is not None, extras[-2:], options[:-2]
    ctx.wants = [x.requires_grad for x in arrays]
    ctx.save_for_backward(q, k, v, *output, *extras._replace(page_table=None)[:-2], *arrays)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse):
    if ctx.is_paged:
        raise UnsupportedError("keys in pages have no gradients: pack or pad them")
    q, k, v, out, lse, *others = ctx.saved_tensors
    extras, arrays = others[: len(TENSORS)], list(others[len(TENSORS) :])
    if dout is None and dlse is None:
        return (None, None, None, [None] * len(arrays), *(None,) * (_ARGUMENTS - 4))
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dsinks, darrays = torch.ops.fa_attn.backward_program(
        dout, q, k, v, out, lse, dlse, ctx.wants, arrays, *ctx.programs, *extras, *ctx.bounds, *ctx.options
    )
    darrays = [
        dx.to(x.dtype) if wanted else None for x, dx, wanted in zip(arrays, darrays, ctx.wants)
    ]
    has_sinks = extras[TENSORS.index("sinks")] is not None
    of_extras = Extras(sinks=dsinks if has_sinks else None, max_seqlen_q=None, max_seqlen_k=None)
    none = (None,) * (_ARGUMENTS - 3 - _PROGRAM_ARGUMENTS - len(of_extras))
    return (dq, dk, dv, darrays, *(None,) * (_PROGRAM_ARGUMENTS - 1), *of_extras, *none)


_forward_operator.register_autograd(_differentiate, setup_context=_setup)


def attention_with(mods: Modifications, q, k, v, options, extras, division=None):
    """(out, lse) of a call with programs, with gradients for the arrays that they read."""
    if is_transforming() or forward_ad._current_level >= 0:
        raise UnsupportedError(
            "a mask or a change of scores of one's own within torch.func or forward-mode derivatives: call it "
            "outside, gradients are by backward() and torch.autograd.grad"
        )
    arrays = []
    for name, x in zip(("k", "v", *mods.names), (k, v, *mods.arrays)):
        if not isinstance(x, torch.Tensor):
            # Of numpy, as functions close over them.
            x = torch.from_numpy(x).to(q.device)
        check_tensor(name, x)
        if hasattr(x, "placements"):
            raise UnsupportedError(
                f"{name} is a DTensor beside a mask or a change of scores of one's own: call it on local tensors"
            )
        if x.device != q.device:
            raise InputError(f"{name} is on {x.device} and q on {q.device}: move it there")
        arrays.append(_as_read(x))
    extras = NO_EXTRAS if extras is None else extras
    if extras.sinks is not None and extras.sinks.dtype != FLOAT:
        extras = extras._replace(sinks=extras.sinks.to(FLOAT))
    splits, packs = division or (None, None)
    return torch.ops.fa_attn.forward_program(
        q,
        k,
        v,
        arrays[2:],
        list(mods.names),
        list(mods.texts),
        [name for name, _ in mods.scalars],
        [float(value) for _, value in mods.scalars],
        *extras,
        *flat(options),
        0 if splits is None else splits,
        packs,
    )


_READ = {torch.float64: torch.float32, torch.int64: torch.int32, torch.int16: torch.int32, torch.int8: torch.int32}


def _as_read(x):
    """An array in a type that programs read: as tracing declares those that they do not."""
    kind = _READ.get(x.dtype)
    return x if kind is None else x.to(kind)


def narrow(x):
    """The array with an axis of 1 where it is expanded, which is summed in one go for its gradient."""
    if torch.compiler.is_compiling() or 0 not in x.stride():
        return x
    if x.requires_grad and type(x.grad_fn).__name__ != "ExpandBackward0":
        return x
    for axis, (size, stride) in enumerate(zip(x.shape, x.stride())):
        if stride == 0 and size > 1:
            x = x.narrow(axis, 0, 1)
    return x


def packed_bits(mask):
    """A mask's bits along the last axis, in words of 32, the lowest first."""
    if mask.shape[-1] == 1:
        return torch.where(mask, -1, 0).to(torch.int32)
    mask = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 32))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=mask.device)
    eights = mask.reshape(*mask.shape[:-1], -1, 8)
    return (eights * weights).sum(-1, dtype=torch.uint8).view(torch.int32)


count_operations()
