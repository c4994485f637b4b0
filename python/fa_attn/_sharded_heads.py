"""Attention by heads over the GPUs of one host: shards of rows become shards of heads, some heads at a time,
by copies that need no SM. Those of the next heads, and the results of those before, move while some are
computed; each lands where it belongs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ._core import UnsupportedError
from ._sharded import dealt
from ._sharded_copies import copies_of
from ._sharded_peers import in_step, telling
from .interface import flash_attn_backward, flash_attn_func

# Rows of the whole from which copies of some heads are hidden under the kernels of others.
_ROWS_IN_STAGES = 16384

# And from which a step of training is faster by heads.
_ROWS_BY_HEADS = 8192


class _Grid:
    """Who has which rows and heads: chunks of rows, and of the heads a share for each rank."""

    def __init__(self, copies, layout, shapes):
        self.copies, self.world, self.rank = copies, copies.world, copies.rank
        self.owned = dealt(layout, self.world)
        self.chunks, self.mine = len(self.owned[0]) * self.world, self.owned[self.rank]
        # Chunks of a rank, ascending and evenly apart.
        self.own = self._slice(self.mine)
        rows, heads = shapes[0][1], min(shape[2] for shape in shapes) // self.world
        self.rows = rows // len(self.mine)
        is_staged = rows * self.world >= _ROWS_IN_STAGES and heads % 2 == 0
        self.stages = 2 if is_staged else 1

    @staticmethod
    def _slice(chunks):
        step = chunks[1] - chunks[0] if len(chunks) > 1 else 1
        return slice(chunks[0], chunks[-1] + 1, step)

    def by_chunks(self, x):
        """(batch, chunks, rows, heads, d) of rows that are whole chunks."""
        return x.unflatten(1, (-1, self.rows))

    def _others(self, rank):
        """The ranges of other ranks' heads, by share."""
        return [(first, last) for first, last in ((0, rank), (rank + 1, self.world)) if first < last]

    def to_heads(self, tensors):
        """Begins to turn shards of rows as shards of heads. Returns, for each stage, what `arrived` takes."""
        batch, rows = tensors[0].shape[:2]
        shares = [x.shape[2] // self.world for x in tensors]
        shapes = [
            ((batch, rows, share * (self.world - 1), x.shape[3]), x.dtype)
            for x, share in zip(tensors, shares)
        ]
        message = self.copies.message(shapes)
        for x, view, share in zip(tensors, message.views, shares):
            at = 0
            for first, last in self._others(self.rank):
                count = (last - first) * share
                view[:, :, at : at + count].copy_(x[:, :, first * share : last * share])
                at += count
        wholes = [
            x.new_empty((batch, rows * self.world, share, x.shape[3])) for x, share in zip(tensors, shares)
        ]
        message.ready()
        events = []
        for stage in range(self.stages):
            for rank in self._in_turn():
                # Of the shares that a rank sends its own is none.
                place = self.rank - (self.rank > rank)
                for at, (view, whole, share) in enumerate(zip(message.views, wholes, shares)):
                    self._pull_heads(message, rank, at, view, whole, share, place, stage)
            events.append(message.pulled(stage == self.stages - 1))
        for x, whole, share in zip(tensors, wholes, shares):
            own = x[:, :, self.rank * share : (self.rank + 1) * share]
            self.by_chunks(whole)[:, self.own].copy_(self.by_chunks(own))
        return message, events, wholes

    def _in_turn(self):
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def _pull_heads(self, message, rank, at, view, whole, share, place, stage):
        """The heads of a stage of a rank's rows."""
        size = whole.shape[3] * whole.element_size()
        width = share // self.stages * size
        pitches = view.shape[2] * size, share * size
        for number in range(view.shape[0]):
            for index, chunk in enumerate(self.owned[rank]):
                source = ((number * view.shape[1] + index * self.rows) * pitches[0]) + place * share * size
                target = (number * whole.shape[1] + chunk * self.rows) * pitches[1]
                step = stage * width
                address = whole.data_ptr() + target + step
                message.pull(rank, at, source + step, address, pitches, width, self.rows)

    def heads_of(self, whole, stage):
        """The heads of a stage."""
        size = whole.shape[2] // self.stages
        return whole[:, :, stage * size : (stage + 1) * size]

    def to_rows(self, parts, results, stage):
        """Begins to turn shards of heads, those of a stage, as shards of rows of `results`. Returns what
        `arrived` takes."""
        is_pair = self.world == 2
        chunks = self.chunks // 2 if is_pair else self.chunks
        shapes = [((x.shape[0], chunks * self.rows, x.shape[2], x.shape[3]), x.dtype) for x in parts]
        message = self.copies.message(shapes)
        of = self._slice(self.owned[1 - self.rank]) if is_pair else slice(None)
        for x, view in zip(parts, message.views):
            self.by_chunks(view).copy_(self.by_chunks(x)[:, of])
        message.ready()
        for rank in self._in_turn():
            for at, (view, result) in enumerate(zip(message.views, results)):
                size = result.shape[3] * result.element_size()
                width = view.shape[2] * size
                pitches = width, result.shape[2] * size
                first = (rank * self.stages + stage) * width
                for number in range(view.shape[0]):
                    for index, chunk in enumerate(self.mine):
                        lies = index if is_pair else chunk
                        source = (number * view.shape[1] + lies * self.rows) * pitches[0]
                        target = (number * result.shape[1] + index * self.rows) * pitches[1] + first
                        address = result.data_ptr() + target
                        message.pull(rank, at, source, address, pitches, width, self.rows)
        event = message.pulled(True)
        for x, result in zip(parts, results):
            count = x.shape[2]
            first = (self.rank * self.stages + stage) * count
            own = self.by_chunks(x)[:, self.own]
            self.by_chunks(result[:, :, first : first + count]).copy_(own)
        return message, event


class ByHeads(torch.autograd.Function):
    """out, of this rank's rows of Q, K and V. `numbers`: the options of both passes."""

    @staticmethod
    def forward(ctx, q, k, v, copies, group, layout, numbers):
        grid = _Grid(copies, layout, (q.shape, k.shape, v.shape))
        out, kept = q.new_empty((*q.shape[:-1], v.shape[-1])), []
        with copies.kept():
            message, events, wholes = grid.to_heads((q, k, v))
            for stage, event in enumerate(events):
                message.arrived(event)
                own = [grid.heads_of(x, stage) for x in wholes]
                part, lse, _ = flash_attn_func(*own, return_attn_probs=True, **numbers)
                kept += [part, lse]
                last = grid.to_rows((part,), (out,), stage)
            last[0].arrived(last[1])
        ctx.save_for_backward(*wholes, *kept)
        ctx.given, ctx.group = (layout, numbers, [x.shape for x in (q, k, v)]), group
        return out

    @staticmethod
    @once_differentiable
    @telling(lambda ctx: ctx.group)
    def backward(ctx, dout):
        layout, numbers, shapes = ctx.given
        in_step(ctx.group)
        copies = _copies_of_shapes(ctx.group, dout, shapes)
        if copies is None:
            raise UnsupportedError("a graph of the backward without its forward: capture both")
        q, k, v, *kept = ctx.saved_tensors
        grid = _Grid(copies, layout, shapes)
        grads = [dout.new_empty(shape) for shape in shapes]
        with copies.kept():
            message, events, (whole,) = grid.to_heads((dout,))
            for stage, event in enumerate(events):
                message.arrived(event)
                own = [grid.heads_of(x, stage) for x in (whole, q, k, v)]
                made = flash_attn_backward(*own, *kept[2 * stage : 2 * stage + 2], **numbers)
                last = grid.to_rows(made[:3], grads, stage)
            last[0].arrived(last[1])
        return *grads, None, None, None, None


def copies_for(group, *tensors):
    """The copies of a group for messages of all of these tensors; None where there are none, or not of
    these."""
    types = {x.dtype for x in tensors}
    if len(types) > 1 or not types <= {torch.float16, torch.bfloat16}:
        return None
    return _copies_of_shapes(group, tensors[0], [x.shape for x in tensors])


def _copies_of_shapes(group, x, shapes):
    world = dist.get_world_size(group)
    if not all(shape.numel() and shape[2] % world == 0 for shape in shapes):
        return None
    return copies_of(group, x, sum(shape.numel() * x.element_size() + 1024 for shape in shapes))


def is_trained(*tensors):
    """Whether a call is of a step of training."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def gains(q, k, v, group, options):
    """Whether attention by heads is faster than a gather and a ring, where all compute a call that the ranks
    have agreed on: a step of training, since its backward sums and merges nothing. Of a window's keys a
    gather moves less."""
    world = dist.get_world_size(group)
    is_dealt = all(x.shape[2] % world == 0 for x in (q, k, v))
    if not q.is_cuda or not is_dealt or not is_trained(q, k, v):
        return False
    if options.left >= 0 or q.shape[1] * world < _ROWS_BY_HEADS:
        return False
    # Without copies only where it moves no more than a gather, with its sums in float32.
    moves_less = q.shape[2] + k.shape[2] <= 2 * world * k.shape[2]
    return moves_less or copies_for(group, q, k, v) is not None
