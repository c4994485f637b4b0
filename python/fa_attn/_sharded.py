"""Rows of sequences that the ranks of a process group share: who holds which, and how they are gathered."""

from __future__ import annotations

import itertools
import math

import torch
import torch.distributed as dist

from . import _core
from ._checks import window
from ._core import InputError, UnsupportedError
from ._options import call_options
from ._sharded_peers import finished, of_all, place, telling, transferred
from ._torch_memory import autocast

LAYOUTS = ("zigzag", "contiguous")


def dealt(layout, world):
    """The chunks of each rank, in the order in which it stores them: those of the crate fa-dist."""
    if not isinstance(layout, str):
        raise InputError(f"layout is {layout!r}: it must be a name, zigzag or contiguous")
    return _core.chunks(layout, world)


# Called by torch.compile where it traces, not traced.
dealt._dynamo_marked_constant = True


def chunk_length(rows, per_rank, layout):
    if rows % per_rank:
        raise InputError(
            f"a rank has {rows} rows, which {per_rank} chunks of equal length do not have: pad the sequence "
            f"to a multiple of {per_rank} times the ranks ({layout} shards)"
        )
    return rows // per_rank


def bounds(layout, world, rows):
    """Where the chunks of a sequence begin, and its end."""
    return tuple(_core.bounds(layout, world, rows))


bounds._dynamo_marked_constant = True


class Dealing:
    """A sequence of some rows in chunks, and which rank has which: of equal length where the ranks divide the
    rows, else some are a row longer, or empty."""

    def __init__(self, layout, world, rows):
        # Of a length that torch.compile traces the number.
        rows = len(range(rows))
        self.rows, self.owned = rows, dealt(layout, world)
        self.bounds = bounds(layout, world, rows)
        self.most = max(self.count(rank) for rank in range(world))

    def count(self, rank):
        """The rows of a rank."""
        return sum(end - first for first, end in self.spans(rank))

    def spans(self, rank):
        """The first row of each chunk of a rank, and its end."""
        return [(self.bounds[chunk], self.bounds[chunk + 1]) for chunk in self.owned[rank]]

    def in_order(self, parts, dim):
        """The chunks of all ranks' rows, which may be followed by others, in the order of the sequence."""
        chunks = {}
        for rank, part in enumerate(parts):
            lengths = [end - first for first, end in self.spans(rank)]
            chunks.update(zip(self.owned[rank], part.narrow(dim, 0, sum(lengths)).split(lengths, dim)))
        return [chunks[chunk] for chunk in sorted(chunks)]

    def is_in_order(self, batch):
        """Whether the rows of all ranks, one after the other, are those of the sequence. `batch`: the axes of
        tensors before the rows."""
        counts = {self.count(rank) for rank in range(len(self.owned))}
        return math.prod(batch) == 1 and len(counts) == 1 and all(len(own) == 1 for own in self.owned)

    def of_rank(self, tensor, rank, dim):
        """A rank's rows of the whole."""
        own = [tensor.narrow(dim, first, end - first) for first, end in self.spans(rank)]
        return own[0] if len(own) == 1 else torch.cat(own, dim)

    def padded(self, tensor, dim):
        """A rank's rows, with others behind them so that all ranks have as many."""
        short = self.most - tensor.shape[dim]
        if not short:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = short
        return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def shard(tensor, dim=1, group=None, layout="zigzag"):
    """This rank's rows of a whole tensor. Where the ranks do not divide them some have a row more:
    `attention` is then told by `seqlen`."""
    world, rank = place(group)
    dealt(layout, world)
    if not -tensor.dim() <= dim < tensor.dim():
        raise InputError(f"axis {dim} of a tensor of {tensor.dim()} axes")
    return Dealing(layout, world, tensor.shape[dim]).of_rank(tensor, rank, dim)


def unshard(tensor, dim=1, group=None, layout="zigzag", seqlen=None):
    """The whole tensor, from each rank's rows. Without gradients. `seqlen`: the rows of the whole, where the
    ranks do not divide them."""
    world, rank = place(group)
    dealing = of_rows(layout, world, rank, tensor.shape[dim], seqlen)
    parts = of_all(dealing.padded(tensor.detach(), dim), group, world)
    return torch.cat(dealing.in_order(parts, dim), dim)


def of_rows(layout, world, rank, rows, seqlen):
    """How a sequence is dealt of which this rank has `rows` rows."""
    if seqlen is None:
        chunk_length(rows, len(dealt(layout, world)[rank]), layout)
        return Dealing(layout, world, rows * world)
    if not isinstance(seqlen, int) or seqlen < 0:
        raise InputError(f"seqlen is {seqlen!r}: it must be the number of rows of the whole sequence")
    dealing = Dealing(layout, world, seqlen)
    if dealing.count(rank) != rows:
        raise InputError(
            f"seqlen is {seqlen}, of which rank {rank} of {world} has {dealing.count(rank)} rows ({layout} "
            f"shards), and {rows} are given: deal them by fa_attn.distributed.shard"
        )
    return dealing


class Results:
    """Memory of this rank's O and LSE, and of all ranks', which one transfer brings: of both a sequence."""

    def __init__(self, shape, dtype, like, world):
        self.shapes = (shape, dtype), ((shape[0], shape[2], shape[1]), torch.float32)
        self.ends = []
        for of, kind in self.shapes:
            first = self.ends[-1][1] if self.ends else 0
            # Kernels read whole vectors.
            first += -first % 16
            self.ends.append((first, first + math.prod(of) * kind.itemsize))
        count = self.ends[-1][1] + -self.ends[-1][1] % 16
        self.own = like.new_empty(count, dtype=torch.uint8)
        self.all = like.new_empty(world * count, dtype=torch.uint8)
        self.out, self.lse = self._of(self.own)
        parts = [self._of(x) for x in self.all.view(world, count).unbind()]
        self.outs, self.lses = ([part[at] for part in parts] for at in range(2))

    def _of(self, memory):
        spans = zip(self.ends, self.shapes)
        return [memory[first:end].view(kind).view(of) for (first, end), (of, kind) in spans]

    def gather(self, group):
        """Fills those of all ranks."""
        # Without torch's checks of what is the same at each call.
        finished(group._allgather_base(self.all, self.own, _GATHERS), self.own, group)


_GATHERS = dist.distributed_c10d.AllgatherOptions()
_GATHERS.asyncOp = False


def positions(rows, group=None, layout="zigzag", device=None, seqlen=None):
    """The positions in the whole sequence of this rank's `rows` rows: what rotary embedding takes. `seqlen`:
    the rows of the whole, where the ranks do not divide them."""
    world, rank = place(group)
    dealing = of_rows(layout, world, rank, rows, seqlen)
    return torch.cat([torch.arange(first, end, device=device) for first, end in dealing.spans(rank)])


class Options:
    """What all parts of a call have in common."""

    def __init__(self, scale, causal, window_size, softcap, deterministic, alibi_slopes=None, sinks=None):
        self.left, right = window(window_size)
        self.right = 0 if causal else right
        self.causal = self.right == 0
        self.slopes, self.sinks = alibi_slopes, sinks
        self.common = dict(softmax_scale=scale, softcap=softcap)
        self.backward = dict(self.common, deterministic=deterministic)

    def __repr__(self):
        given = self.backward, self.left, self.right
        return repr((*given, self.slopes is not None, self.sinks is not None))

    def seen(self, first, end, total):
        """The keys that rows `first` to `end` see, and the mask between them, whose diagonal ends in the last
        row and key."""
        stop = total if self.right < 0 else min(total, end + self.right)
        start = max(0, first - self.left) if self.left >= 0 else 0
        beyond = stop - end
        sides = (self.left + beyond if self.left >= 0 else -1, max(self.right - beyond, -1))
        return slice(start, stop), dict(causal=self.causal, window_size=sides)

    def check_shapes(self, batch, heads):
        """Whether slopes and sinks are those of all heads, before parts are taken of them."""
        one = ((heads,),)
        of_slopes = one if batch is None else ((heads,), (batch, heads))
        for name, x, shapes in (("alibi_slopes", self.slopes, of_slopes), ("sinks", self.sinks, one)):
            if x is not None and (not isinstance(x, torch.Tensor) or tuple(x.shape) not in shapes):
                got = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
                raise InputError(
                    f"{name} is {got}: it must be a torch tensor of all heads on every rank, of the shape "
                    f"{' or '.join(map(str, shapes))}"
                )

    def numbers(self, mask):
        """Those of a part, checked."""
        scale, softcap = self.common["softmax_scale"], self.common["softcap"]
        deterministic = self.backward["deterministic"]
        return call_options(scale, mask["causal"], mask["window_size"], softcap, deterministic, None)

    def of(self, heads):
        """What belongs to some of the query heads."""
        named = dict(alibi_slopes=self.slopes, sinks=self.sinks)
        return {name: x[..., heads].contiguous() for name, x in named.items() if x is not None}


class Gathered:
    """K and V (.., rows, heads, head_dim) of all ranks, some heads at a time: the next while those before are
    used."""

    def __init__(self, k, v, group, dealing, stages):
        self.k, self.v, self.group, self.dealing = k, v, group, dealing
        self.world, heads = dist.get_world_size(group), k.shape[-2]
        if k.dtype != v.dtype:
            # One transfer would make one type of both.
            raise InputError(f"k is {k.dtype} and v {v.dtype}: both need q's type")
        if not isinstance(stages, int) or stages < 1 or heads % stages:
            raise InputError(f"stages is {stages}: it must divide the {heads} K/V heads")
        size = heads // stages
        self.stages = [slice(stage * size, (stage + 1) * size) for stage in range(stages)]
        # Each is then gathered to where it belongs.
        self.is_in_order = stages == 1 and dealing.is_in_order(k.shape[:-3])

    def __iter__(self):
        pending = self._start(self.stages[0])
        for heads, following in itertools.zip_longest(self.stages, self.stages[1:]):
            work, parts = pending
            if following is not None:
                pending = self._start(following)
            for one in work:
                finished(one, self.k, self.group)
            yield heads, *(parts if self.is_in_order else self._whole(parts, heads.stop - heads.start))

    def _start(self, heads):
        """Begins to gather K and V, in one transfer where they are to be put in order anyway: each has a
        latency of its own."""
        if self.is_in_order:
            works, parts = [], []
            for x in (self.k, self.v):
                own = x.contiguous()
                part = own.new_empty((*x.shape[:-3], self.world * x.shape[-3], *x.shape[-2:]))
                flat = part.view(-1), own.view(-1)
                works.append(dist.all_gather_into_tensor(*flat, group=self.group, async_op=True))
                parts.append(part)
            return works, parts
        own = [self.dealing.padded(x[..., heads, :], -3).reshape(-1) for x in (self.k, self.v)]
        own = torch.cat(own)
        parts = own.new_empty(self.world * len(own))
        return [dist.all_gather_into_tensor(parts, own, group=self.group, async_op=True)], parts

    def _whole(self, parts, heads):
        """K and V of all ranks, in the order of the sequence."""
        parts, end = parts.view(self.world, -1), 0
        for own in (self.k, self.v):
            shape = (*own.shape[:-3], self.dealing.most, heads, own.shape[-1])
            first, end = end, end + math.prod(shape)
            chunks = self.dealing.in_order([x.view(shape) for x in parts[:, first:end]], -3)
            yield torch.cat(chunks, -3)


def summed(total, group, dealing):
    """This rank's rows of the sum over ranks, in the order of the ranks, by float32."""
    world, rank = place(group)
    if dealing.is_in_order(total.shape[:-3]):
        sends = total.view(world, *total.shape[:-3], dealing.most, *total.shape[-2:])
    else:
        sends = [dealing.padded(dealing.of_rank(total, other, -3), -3) for other in range(world)]
        sends = torch.stack(sends)
    parts = torch.empty_like(sends)
    transferred("all_to_all_single", parts, sends, group=group)
    result = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        result += part
    return result.narrow(-3, 0, dealing.count(rank))


def spans_of(dealing, rank):
    """For each chunk of a rank its rows among the rank's own, and the first in the sequence."""
    spans, at = [], 0
    for first, end in dealing.spans(rank):
        spans.append((slice(at, at + end - first), first))
        at += end - first
    return spans


def parts_of(spans, rows, options):
    """For each chunk of this rank its rows, the keys of all ranks that they see, no lengths, and the mask,
    the longest first."""
    parts = []
    for own, first in reversed(spans):
        seen, mask = options.seen(first, first + own.stop - own.start, rows)
        parts.append((own, seen, (), mask))
    return parts


def in_parts(q, k, v, passes, parts, group, dealing, stages, options):
    """(out, lse) of parts of this rank's rows, each over some of the rows of all ranks."""
    ratio = q.shape[-2] // k.shape[-2]
    *batch, rows_q, heads_q, _ = q.shape
    out = lse = None
    is_one = _is_one(parts, stages, rows_q)
    if not is_one:
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
        lse = torch.empty(*batch, heads_q, rows_q, dtype=torch.float32, device=q.device)
    for heads, keys, values in Gathered(k, v, group, dealing, stages):
        of = slice(heads.start * ratio, heads.stop * ratio)
        for rows, seen, lengths, mask in parts:
            part, part_lse, _ = passes[0](
                q[..., rows, of, :],
                keys[..., seen, :, :],
                values[..., seen, :, :],
                *lengths,
                return_attn_probs=True,
                **options.common,
                **options.of(of),
                **mask,
            )
            if is_one:
                out, lse = part, part_lse
            else:
                out[..., rows, of, :], lse[..., of, rows] = part, part_lse
    return out, lse


def _is_one(parts, stages, count):
    """Whether one part has all heads of all rows, `count` of them, in their order."""
    if stages != 1 or len(parts) != 1:
        return False
    rows = parts[0][0]
    return isinstance(rows, slice) and rows.indices(count) == (0, count, 1)


def in_parts_backward(dout, dlse, q, k, v, out, lse, passes, parts, group, dealing, stages, options):
    """(dq, dk, dv, dsinks) of `in_parts`. Gathers again: nothing of other ranks is kept."""
    ratio = q.shape[-2] // k.shape[-2]
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dsinks = None if options.sinks is None else torch.zeros_like(options.sinks)
    is_one = _is_one(parts, stages, q.shape[-3])
    for heads, keys, values in Gathered(k, v, group, dealing, stages):
        of = slice(heads.start * ratio, heads.stop * ratio)
        # Of one part the sums are what its kernel writes.
        kind = torch.float32 if len(parts) > 1 else k.dtype
        sums = [torch.zeros(x.shape, dtype=kind, device=x.device) for x in (keys, values)]
        for rows, seen, lengths, mask in parts:
            made = passes[1](
                dout[..., rows, of, :],
                q[..., rows, of, :],
                keys[..., seen, :, :],
                values[..., seen, :, :],
                out[..., rows, of, :],
                lse[..., of, rows].contiguous(),
                *lengths,
                dlse=None if dlse is None else dlse[..., of, rows].contiguous(),
                **options.backward,
                **options.of(of),
                **mask,
            )
            if is_one:
                dq = made[0]
            else:
                dq[..., rows, of, :] = made[0]
            for total, part in zip(sums, made[1:]):
                if len(parts) == 1:
                    total[..., seen, :, :] = part
                else:
                    total[..., seen, :, :] += part
            if dsinks is not None:
                dsinks[of] += made[3]
        for to, total in zip((dk, dv), sums):
            to[..., heads, :] = summed(total, group, dealing)
    return dq, dk, dv, dsinks


class InParts(torch.autograd.Function):
    """`in_parts` with gradients. `passes`: the functions of the forward and the backward; `parts`: for each
    its rows, the rows that they see, the lengths that the functions take, and the mask."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, passes, parts, group, dealing, stages, options):
        ctx.given = (passes, parts, group, dealing, stages, options)
        out, lse = in_parts(q, k, v, *ctx.given)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    @telling(lambda ctx: ctx.given[2])
    def backward(ctx, dout, dlse):
        gradients = in_parts_backward(dout, dlse, *ctx.saved_tensors, *ctx.given)
        return *gradients, None, None, None, None, None, None


def stacked(function, axis):
    """The forms of a function that take K and V, or Q, K and V, stacked along an axis."""

    def kvpacked(q, kv, *args, **options):
        return function(q, *kv.unbind(axis), *args, **options)

    def qkvpacked(qkv, *args, **options):
        return function(*qkv.unbind(axis), *args, **options)

    for form in (kvpacked, qkvpacked):
        form.__name__ = form.__qualname__ = f"{function.__name__.removesuffix('func')}{form.__name__}_func"
        form.__doc__ = f"`{function.__name__}` of tensors that are stacked along axis {axis}."
    return kvpacked, qkvpacked


def cast(q, k, v):
    """Q, K and V as autocast casts those of one GPU."""
    return autocast(q, k, v) if q.dtype is torch.float32 or not q.dtype is k.dtype is v.dtype else (q, k, v)


def check(dropout_p, **axes):
    if dropout_p != 0.0:
        raise UnsupportedError(
            f"dropout_p is {dropout_p}: over several ranks it is computed by attention and "
            "ulysses_attention, use these or leave it out"
        )
    for name, (x, count) in axes.items():
        if not isinstance(x, torch.Tensor):
            raise InputError(f"{name} is of the type {type(x).__name__}: it must be a torch tensor")
        if hasattr(x, "placements"):
            raise UnsupportedError(
                f"{name} is a DTensor: give {name}.to_local(), this rank's rows, and make one of the result "
                "by DTensor.from_local"
            )
        if x.dim() != count:
            raise InputError(f"{name} has the shape {tuple(x.shape)}: it must have {count} axes")
    devices = {name: x.device for name, (x, _) in axes.items()}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise InputError(f"{where}: all have to be on one device, that of the group's transfers")
    if axes:
        heads_q, heads_k, heads_v = (x.shape[-2] for x, _ in axes.values())
        if not heads_k or heads_q % heads_k or heads_v != heads_k:
            raise InputError(
                f"q has {heads_q} heads, k {heads_k} and v {heads_v}: k and v need as many, a divisor of q's"
            )
