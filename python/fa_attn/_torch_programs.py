"""Attention with programs of the caller's, which are texts, with lists of the arrays and scalars that they
read: the operators `fa_attn::forward_program` and `fa_attn::backward_program`, and without them calls of
plain tensors: of an operator with as many arguments torch takes a millisecond to record the gradient."""

from __future__ import annotations

import sys
from functools import lru_cache, partial

import torch
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from ._checks import check_integers, wants_gradient
from ._core import InputError, InputTypeError
from ._modifications import Modifications
from ._options import NO_EXTRAS, TENSORS, Extras, division_of
from ._programs import not_compiled
from ._torch_direct import replaced
from ._torch_dropout import BITS, with_bits
from ._torch_memory import (
    FLOAT,
    PLAIN,
    check_tensor,
    detached,
    goes_by_operator,
    is_compiling,
    is_lasting,
    is_plain,
    is_transforming,
    lse_shape,
    needs_rules,
    new_gradients,
    new_out,
    rows_of,
)
from ._torch_operators import one_by_one, refused_twice, within_func
from ._torch_passes import (
    has_kernels,
    is_by_operator,
    once_only,
    run_backward,
    run_forward,
    save,
    saved_of,
    wanted_gradients,
)
from ._torch_schemas import EXTRAS, OPTIONS, extras_of, flat, options_of, schema, tensors
from ._torch_sharded_programs import over_ranks
from ._torch_wide import is_wide

# The most arrays of a program, and the most scalars.
_MOST, _MOST_SCALARS = 16, 8
_SEPARATOR = "\x1e"
_HALVES = (torch.float16, torch.bfloat16)
_ARRAYS = [f"array_{at}" for at in range(_MOST)]
_SCALARS = [f"scalar_{at}" for at in range(_MOST_SCALARS)]
_PROGRAM = ", ".join(
    [
        *(f"Tensor? {name}" for name in _ARRAYS),
        *(f"float {name}" for name in _SCALARS),
        "str texts, str names, str scalar_names",
    ]
)
_PROGRAM_ARGUMENTS = _MOST + _MOST_SCALARS + 3


def _check_counts(arrays, scalars):
    for what, count, most in (("arrays", len(arrays), _MOST), ("scalars", len(scalars), _MOST_SCALARS)):
        if count > most:
            raise InputError(f"the programs of a call read {count} {what}: at most {most} can be read")


def _flat(mods, arrays):
    """Programs as an operator's arguments."""
    names, values = zip(*mods.scalars) if mods.scalars else ((), ())
    _check_counts(arrays, values)
    arrays = (*arrays, *(None,) * (_MOST - len(arrays)))
    values = (*map(float, values), *(0.0,) * (_MOST_SCALARS - len(values)))
    return (*arrays, *values, _SEPARATOR.join(mods.texts), ",".join(mods.names), ",".join(names))


def _names(text):
    return text.split(",") if text else []


def _programs(program, q, k, extras):
    """An operator's arguments as the extension module takes them."""
    arrays, values = program[:_MOST], program[_MOST : _MOST + _MOST_SCALARS]
    texts, names, scalar_names = program[_MOST + _MOST_SCALARS :]
    arrays = [(name, x.detach().resolve_neg()) for name, x in zip(_names(names), arrays)]
    scalars = list(zip(_names(scalar_names), values))
    arrays = with_bits(arrays, scalars, q, k, extras)
    return texts.split(_SEPARATOR), arrays, scalars


def _at_once(mods, q, k, v, arrays, options, extras, division, wants_lse):
    """The results of a call that nothing records but autograd; None of others."""
    if goes_by_operator(q, k, v) or not all(map(is_plain, arrays)):
        return None
    _check_counts(arrays, mods.scalars)
    sinks = extras.sinks
    differentiated = (q, k, v, *arrays) if sinks is None else (q, k, v, sinks, *arrays)
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    extras = _read(extras)
    call = mods.texts, mods.names, [(name, float(value)) for name, value in mods.scalars], options
    if torch.is_grad_enabled() and any(x.requires_grad for x in differentiated):
        return ProgramAttention.apply(q, k, v, sinks, call, extras, division, *arrays)
    programs = _given(call, q, k, [x.detach() if x.requires_grad else x for x in arrays], extras)
    q, k, v = (x.detach() if x.requires_grad else x for x in (q, k, v))
    return run_forward(
        q, k, v, options, extras, division=division, wants_lse=wants_lse, programs=programs
    )


def _given(call, q, k, arrays, extras):
    """A call's programs as the extension module takes them."""
    texts, names, scalars, _ = call
    return list(texts), with_bits(list(zip(names, arrays)), scalars, q, k, extras), scalars


class ProgramAttention(torch.autograd.Function):
    """out and LSE from q, k, v, sinks and the arrays of programs, with gradients. `call`: the texts of the
    programs, the names of their arrays, their scalars, and the call's options."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, call, extras, division, *arrays):
        programs = _given(call, q, k, arrays, extras)
        out, lse = run_forward(q, k, v, call[-1], extras, division=division, programs=programs)
        save(ctx, extras, q, k, v, out, lse, *arrays)
        ctx.call, ctx.wants = call, ctx.needs_input_grad[7:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_only
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * (7 + len(ctx.wants))
        (q, k, v, out, lse, *arrays), extras = saved_of(ctx)
        *call, options = ctx.call
        wants = list(ctx.wants)
        if is_by_operator(dout, dlse):
            extras = NO_EXTRAS if extras is None else extras
            dout = torch.zeros_like(out) if dout is None else dout
            mods = Modifications(*call[:2], tuple(arrays), tuple(call[2]))
            given = (dout, q, k, v, out, lse, dlse, wants, *_flat(mods, arrays), *extras, *flat(options))
            dq, dk, dv, dsinks, *made = torch.ops.fa_attn.backward_program(*map(_constant, given))
            dsinks = None if extras.sinks is None else dsinks
        else:
            programs = _given(ctx.call, q, k, arrays, extras)
            made = _rooms(programs[1], wants, programs[0], q, v, options)
            own = [(name, x) for (name, _), x in zip(programs[1], made) if x is not None]
            dq, dk, dv = grads = wanted_gradients(ctx, q, k, v, extras)
            tensors = (dout, q, k, v, out, lse, grads)
            dsinks = run_backward(*tensors, options, extras, dlse, programs=programs, gradients=own)
        darrays = [x.to(array.dtype) if wanted else None for x, array, wanted in zip(made, arrays, wants)]
        return (dq, dk, dv, dsinks, None, None, None, *darrays)


def _constant(x):
    """An argument of an operator without what autograd recorded of it."""
    return x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x


def _parted(arguments):
    """(program, extras, other arguments) from an operator's arguments behind its first tensors."""
    extras, others = extras_of(arguments[_PROGRAM_ARGUMENTS:])
    return arguments[:_PROGRAM_ARGUMENTS], extras, others


def _read(extras):
    return None if all(x is None for x in extras[:-2]) else detached(extras)


def _forward(q, k, v, *arguments):
    program, extras, arguments = _parted(arguments)
    options, parts = options_of(arguments)
    q, k, v = (rows_of(x.detach()) for x in (q, k, v))
    # Torch leaves out arguments that have their defaults.
    division = division_of(*parts, *(0, None)[len(parts) :])
    extras = _read(extras)
    programs = _programs(program, q, k, extras)
    return run_forward(q, k, v, options, extras, division=division, programs=programs)


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
    options = options_of(_parted(arguments)[2])[0]
    return new_out(q, v, options), q.new_empty(lse_shape(q), dtype=FLOAT)


def _rooms(named, wants, texts, q, v, options):
    """Where the gradients of arrays go, None for those that want none: of an array of 16 bits in its type,
    where kernels write them, else in f32, as torch adds them up."""
    has_own = has_kernels(q) and not is_wide(q, v, options)
    summed = replaced(tuple(texts)) if has_own else ()

    def dtype(name, x):
        return x.dtype if has_own and name not in summed and x.dtype in _HALVES else FLOAT

    return [
        q.new_empty(x.shape, dtype=dtype(name, x)) if wanted else None
        for (name, x), wanted in zip(named, wants)
    ]


def _all_rooms(*call):
    """The same as an operator's results: of no elements where nothing is wanted."""
    rooms = _rooms(*call)
    rooms += [None] * (_MOST - len(rooms))
    return [call[3].new_empty((0,), dtype=FLOAT) if x is None else x for x in rooms]


def _backward(dout, q, k, v, out, lse, dlse, wants, *arguments):
    program, extras, arguments = _parted(arguments)
    dout, q, k, v, out, lse = (x.detach() for x in (dout, q, k, v, out, lse))
    q, k, v, extras = rows_of(q), rows_of(k), rows_of(v), _read(extras)
    grads = new_gradients(q, k, v, extras)
    programs = _programs(program, q, k, extras)
    options = options_of(arguments)[0]
    made = _all_rooms(programs[1], wants, programs[0], q, v, options)
    own = [(name, x) for (name, _), x, wanted in zip(programs[1], made, wants) if wanted]
    arrays = (dout, q, k, v, out, lse, grads)
    dsinks = run_backward(*arrays, options, extras, dlse, programs=programs, gradients=own)
    return (*grads, q.new_empty((0,), dtype=FLOAT) if dsinks is None else dsinks, *made)


_backward_operator = torch.library.custom_op(
    "fa_attn::backward_program",
    _backward,
    mutates_args=(),
    schema=schema(
        tensors("dout", "q", "k", "v", "out", "lse", "dlse?"),
        "bool[] wants",
        _PROGRAM,
        EXTRAS,
        OPTIONS,
        results=4 + _MOST,
    ),
)


@_backward_operator.register_fake
def _(dout, q, k, v, out, lse, dlse, wants, *arguments):
    program, extras, options = _parted(arguments)
    dsinks = q.new_empty(q.shape[-2:-1] if extras.sinks is not None else (0,), dtype=FLOAT)
    texts, names, _ = program[_MOST + _MOST_SCALARS :]
    named = list(zip(_names(names), program[:_MOST]))
    made = _all_rooms(named, wants, texts.split(_SEPARATOR), q, v, options_of(options)[0])
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks, *made


_ARGUMENTS = len(_forward_operator._opoverload._schema.arguments)


def _setup(ctx, inputs, output):
    q, k, v, *others = inputs
    program, extras, options = _parted(others)
    ctx.bounds = extras[-2:]
    ctx.options, ctx.program = flat(options_of(options)[0]), program[_MOST:]
    arrays = program[:_MOST]
    ctx.wants = [x.requires_grad for x in arrays if x is not None]
    ctx.save_for_backward(q, k, v, *output, *extras[:-2], *arrays)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse):
    if dout is None and dlse is None:
        return (None,) * _ARGUMENTS
    q, k, v, out, lse, *others = ctx.saved_tensors
    extras, arrays = others[: len(TENSORS)], others[len(TENSORS) :]
    dout = torch.zeros_like(out) if dout is None else dout
    program = (*arrays, *ctx.program)
    operator = torch.ops.fa_attn.backward_program
    if needs_rules():
        operator = _transformed_backward
    dq, dk, dv, dsinks, *made = operator(
        dout, q, k, v, out, lse, dlse, ctx.wants, *program, *extras, *ctx.bounds, *ctx.options
    )
    darrays = [None] * _MOST
    for at, (x, wanted) in enumerate(zip(arrays, ctx.wants)):
        if wanted:
            darrays[at] = made[at].to(x.dtype)
    has_sinks = extras[TENSORS.index("sinks")] is not None
    of_extras = Extras(sinks=dsinks if has_sinks else None, max_seqlen_q=None, max_seqlen_k=None)
    of_program = (*darrays, *(None,) * len(ctx.program))
    none = (None,) * (_ARGUMENTS - 3 - len(of_program) - len(of_extras))
    return (dq, dk, dv, *of_program, *of_extras, *none)


_forward_operator.register_autograd(_differentiate, setup_context=_setup)
_backward_operator.register_autograd(refused_twice)


_transformed = within_func(torch.ops.fa_attn.forward_program, _differentiate, _setup)
_transformed_backward = within_func(torch.ops.fa_attn.backward_program, refused_twice)


for _operator in (_forward_operator, _backward_operator):
    # torch 2.5 and newer.
    if hasattr(_operator, "register_vmap"):
        _operator.register_vmap(one_by_one(_operator))


def attention_with(mods: Modifications, q, k, v, options, extras, division=None, wants_lse=True):
    """(out, lse) of a call with programs, with gradients for the arrays that they read. Where LSE is not
    wanted it may be None."""
    extras = NO_EXTRAS if extras is None else extras
    # Asking a tensor for what it lacks takes longer than its type.
    if type(q) not in PLAIN and hasattr(q, "placements"):
        return over_ranks(attention_with, mods, q, k, v, options, extras, division)
    arrays = []
    for name, x in zip(("k", "v", *mods.names), (k, v, *mods.arrays)):
        if not isinstance(x, torch.Tensor):
            # Of numpy, as functions close over them.
            x = torch.from_numpy(x).to(q.device)
        check_tensor(name, x)
        if type(x) not in PLAIN and hasattr(x, "placements"):
            raise InputTypeError(
                f"{name} is a DTensor and q is none: give all of a call's tensors as DTensors, by "
                "distribute_tensor"
            )
        if x.device != q.device:
            raise InputError(f"{name} is on {x.device} and q on {q.device}: move it there")
        # The state of dropout is no array of a program.
        arrays.append(x if name == BITS else _as_read(x))
    if extras.sinks is not None and extras.sinks.dtype != FLOAT:
        extras = extras._replace(sinks=extras.sinks.to(FLOAT))
    made = _at_once(mods, q, k, v, arrays[2:], options, extras, division, wants_lse)
    if made is not None:
        return made
    splits, packs = division or (None, None)
    operator = torch.ops.fa_attn.forward_program
    if needs_rules() or (not is_compiling() and forward_ad._current_level >= 0):
        operator = _transformed
    return operator(
        q,
        k,
        v,
        *_flat(mods, arrays[2:]),
        *extras,
        *flat(options),
        0 if splits is None else splits,
        packs,
    )


_READ = {
    torch.float64: torch.float32,
    torch.int64: torch.int32,
    torch.int16: torch.int32,
    torch.int8: torch.int32,
}


def _as_read(x):
    """An array in a type that programs read: as tracing declares those that they do not."""
    kind = _READ.get(x.dtype)
    if x.dtype == torch.int64 and x.numel() and not torch.compiler.is_compiling():
        if x.device.type != "cpu" or is_transforming():
            # No value is waited for, and of elements of vmap there is none.
            x = x.clamp(-(2**31), 2**31 - 1)
        elif not isinstance(x, FakeTensor):
            check_integers(*x.aminmax())
    return x if kind is None else x.to(kind)


def narrow(x):
    """The array with an axis of 1 where it is expanded, which is summed in one go for its gradient."""
    if torch.compiler.is_compiling() or 0 not in x.stride():
        return x
    if wants_gradient(x) and type(x.grad_fn).__name__ != "ExpandBackward0":
        return x
    for axis, (size, stride) in enumerate(zip(x.shape, x.stride())):
        if stride == 0 and size > 1:
            x = x.narrow(axis, 0, 1)
    return x


def packed_bits(mask):
    """A mask's bits along the last axis, in words of 32, the lowest first."""
    if hasattr(mask, "placements"):
        mask = mask.full_tensor()
    if mask.shape[-1] == 1:
        return torch.where(mask, -1, 0).to(torch.int32)
    if is_compiling() and not is_transforming():
        # One graph serves all lengths: those of one word and of several, and those that 32 divides.
        words = (mask.shape[-1] + 63) // 32
        places = torch.arange(32 * words, device=mask.device)
        last = mask.shape[-1] - 1
        bits = mask.index_select(-1, places.clamp(max=last)) & (places <= last)
        weights = 1 << torch.arange(32, dtype=torch.int32, device=mask.device)
        return (bits.unflatten(-1, (words, 32)) * weights).sum(-1, dtype=torch.int32)
    if mask.shape[-1] % 32:
        mask = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 32))
    if is_transforming():
        # vmap does not see bytes as words.
        weights = 1 << torch.arange(32, dtype=torch.int32, device=mask.device)
        return (mask.reshape(*mask.shape[:-1], -1, 32) * weights).sum(-1, dtype=torch.int32)
    is_kept = is_lasting(mask) and not (mask.is_cuda and torch.cuda.is_current_stream_capturing())
    weights = (_weights if is_kept else _weights.__wrapped__)(mask.device)
    eights = mask.reshape(*mask.shape[:-1], -1, 8)
    return (eights * weights).sum(-1, dtype=torch.uint8).view(torch.int32)


@lru_cache
def _weights(device):
    """Of a byte's bits. Nothing is copied from the host, which a graph does not capture."""
    return 1 << torch.arange(8, dtype=torch.uint8, device=device)


def leave_out_of_graphs():
    """Keeps torch.compile out of what traces the caller's functions. Imports torch's compiler."""
    not_compiled(
        partial(
            torch.compiler.disable,
            reason="a function of masks or scores is traced by fa_attn, not by torch.compile: with "
            "fullgraph=True make a fa_attn.Program of it, or a BlockMask, outside of the compiled function",
        )
    )


# Its import takes seconds: programs without it do not pay for it.
if "torch._dynamo" in sys.modules:
    leave_out_of_graphs()
