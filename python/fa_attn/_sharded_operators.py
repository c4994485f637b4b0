"""The operators `fa_attn::over_ranks` and `fa_attn::exchange`, with their gradients: what torch.compile sees
of attention over several ranks. Groups are arguments by their names."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ._sharded import Options, in_parts, in_parts_backward, of_rows, parts_of, spans_of
from ._sharded_peers import agree, lost, place, transferred
from ._sharded_ring import ring, ring_backward
from ._torch_operators import refused_twice
from ._torch_schemas import schema, tensors
from .interface import flash_attn_backward, flash_attn_func

PASSES = (flash_attn_func, flash_attn_backward)

_GIVEN = (
    "str group, str layout, str scheme, SymInt stages, SymInt? seqlen, float? scale, bool causal, "
    "SymInt left, SymInt right, float softcap, bool deterministic"
)


def name_of(group):
    return (dist.group.WORLD if group is None else group).group_name


# Called by torch.compile where it traces, not traced.
name_of._dynamo_marked_constant = True


def named(name):
    """The group of a name."""
    return dist.distributed_c10d._resolve_process_group(name)


def agreed(group, q, k, v, layout, stages, scheme, seqlen, options, *others):
    """Compares a call with those of the other ranks."""
    shown = (q, k, v) if seqlen is None else (q[:, :0], k[:, :0], v[:, :0], f"seqlen {seqlen}")
    agree(group, *shown, layout, stages, scheme, options, *others)


class _Call:
    """A call by its arguments."""

    def __init__(self, q, k, v, slopes, sinks, group, layout, scheme, stages, seqlen, scale, causal, *rest):
        left, right, softcap, deterministic = rest
        self.group, self.is_ring = named(group), scheme == "ring"
        options = Options(scale, causal, (left, right), softcap, deterministic, slopes, sinks)
        agreed(self.group, q, k, v, layout, stages, scheme, seqlen, options)
        world, rank = place(self.group)
        dealing = of_rows(layout, world, rank, q.shape[1], seqlen)
        if self.is_ring:
            self.given = PASSES, self.group, dealing, options
        else:
            parts = parts_of(spans_of(dealing, rank), dealing.rows, options)
            self.given = PASSES, parts, self.group, dealing, stages, options

    def made(self, functions, *arguments):
        """What the function of a gather or of a ring makes of it."""
        try:
            return functions[self.is_ring](*arguments, *self.given)
        except Exception as error:
            lost(self.group, error)
            raise


def _alone(x):
    """A tensor with memory of its own, as an operator's results have it."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def _forward(q, k, v, slopes, sinks, *given):
    q, k, v = (x.detach() for x in (q, k, v))
    sinks = None if sinks is None else sinks.detach()
    return _Call(q, k, v, slopes, sinks, *given).made((in_parts, ring), q, k, v)


_forward_operator = torch.library.custom_op(
    "fa_attn::over_ranks",
    _forward,
    mutates_args=(),
    schema=schema(tensors("q", "k", "v", "slopes?", "sinks?"), _GIVEN, results=2),
)


@_forward_operator.register_fake
def _(q, k, v, *_):
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


def _backward(dout, dlse, q, k, v, out, lse, slopes, sinks, *given):
    dout, q, k, v, out, lse = (x.detach() for x in (dout, q, k, v, out, lse))
    call = _Call(q, k, v, slopes, sinks, *given)
    made = call.made((in_parts_backward, ring_backward), dout, dlse, q, k, v, out, lse)
    dsinks = made[3] if len(made) > 3 else None
    return (*map(_alone, made[:3]), q.new_empty((0,), dtype=torch.float32) if dsinks is None else dsinks)


_backward_operator = torch.library.custom_op(
    "fa_attn::over_ranks_backward",
    _backward,
    mutates_args=(),
    schema=schema(
        tensors("dout", "dlse?", "q", "k", "v", "out", "lse", "slopes?", "sinks?"), _GIVEN, results=4
    ),
)


@_backward_operator.register_fake
def _(dout, dlse, q, k, v, out, lse, slopes, sinks, *_):
    dsinks = q.new_empty((0,), dtype=torch.float32) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _setup(ctx, inputs, output):
    q, k, v, slopes, sinks, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, slopes, sinks)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse):
    q, k, v, out, lse, slopes, sinks = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    given = (q, k, v, out, lse, slopes, sinks, *ctx.options)
    dq, dk, dv, dsinks = torch.ops.fa_attn.over_ranks_backward(dout, dlse, *given)
    return dq, dk, dv, None, None if sinks is None else dsinks, *(None for _ in ctx.options)


_forward_operator.register_autograd(_differentiate, setup_context=_setup)
_backward_operator.register_autograd(refused_twice)


def over_ranks(q, k, v, group, layout, scheme, stages, seqlen, options):
    """(out, lse) by the operator, with gradients."""
    numbers = options.common["softmax_scale"], options.causal, options.left, options.right
    rest = options.common["softcap"], options.backward["deterministic"]
    given = (name_of(group), layout, scheme, stages, seqlen, *numbers, *rest)
    return torch.ops.fa_attn.over_ranks(q, k, v, options.slopes, options.sinks, *given)


def by_heads(x, group, back):
    """Shards of rows as shards of heads: (batch, rows, heads, d) to (batch, world * rows, heads / world, d),
    or back."""
    world = dist.get_world_size(group)
    batch, rows, heads, dim = x.shape
    if back:
        sends = x.reshape(batch, world, rows // world, heads, dim).transpose(0, 1).contiguous()
    else:
        sends = x.reshape(batch, rows, world, heads // world, dim).permute(2, 0, 1, 3, 4).contiguous()
    parts = torch.empty_like(sends)
    transferred("all_to_all_single", parts, sends, group=group)
    if back:
        return parts.permute(1, 2, 0, 3, 4).reshape(batch, rows // world, world * heads, dim)
    return parts.transpose(0, 1).reshape(batch, world * rows, heads // world, dim)


def _exchange(x, group, back):
    group = named(group)
    try:
        return by_heads(x.detach(), group, back)
    except Exception as error:
        lost(group, error)
        raise


_exchange_operator = torch.library.custom_op(
    "fa_attn::exchange", _exchange, mutates_args=(), schema="(Tensor x, str group, bool back) -> Tensor"
)


@_exchange_operator.register_fake
def _(x, group, back):
    world, (batch, rows, heads, dim) = named(group).size(), x.shape
    shape = (rows // world, heads * world) if back else (rows * world, heads // world)
    return x.new_empty((batch, *shape, dim))


def _setup_exchange(ctx, inputs, output):
    _, *ctx.given = inputs


def _differentiate_exchange(ctx, gradient):
    group, back = ctx.given
    return torch.ops.fa_attn.exchange(gradient, group, not back), None, None


_exchange_operator.register_autograd(_differentiate_exchange, setup_context=_setup_exchange)


def exchange(x, group, back):
    """`by_heads` by the operator, with gradients."""
    return torch.ops.fa_attn.exchange(x, name_of(group), back)
