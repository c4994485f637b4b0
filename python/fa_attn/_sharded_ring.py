"""Attention whose keys and values travel from rank to rank: each rank attends to one rank's while the next
ones are on their way. Results are merged by their LSE in float32; gradients of K and V travel with them, in
float32."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ._merging import merge
from ._sharded_peers import finished, place, telling


def _block(options, rows, keys):
    """Which of some rows and keys of a sequence see each other, both as (first, end), and the mask between
    them, whose diagonal ends in the last row and key; None where none do."""
    (first, last), (begin, end) = rows, keys
    left, right = options.left, options.right
    if left >= 0:
        last, begin = min(last, end + left), max(begin, first - left)
    if right >= 0:
        first, end = max(first, begin - right), min(end, last + right)
    if first >= last or begin >= end:
        return None
    shift = end - last
    # Sides that reach beyond all keys are none.
    left = left + shift if 0 <= left and left + shift < end - begin - 1 else -1
    right = right - shift if 0 <= right and right - shift < last - first - 1 else -1
    return (first, last), (begin, end), (left, right)


def _placed(dealing, rank):
    """For each chunk of a rank that has rows: the first of them among the rank's own, and its span."""
    placed, at = [], 0
    for first, end in dealing.spans(rank):
        if first < end:
            placed.append((at, (first, end)))
        at += end - first
    return placed


def _joined(calls):
    """Calls without a mask of which one continues another's rows or keys, as one."""
    for at, (rows, keys, sides) in enumerate(calls):
        for other, (more_rows, more_keys, other_sides) in enumerate(calls):
            if at == other or sides != (-1, -1) or other_sides != (-1, -1):
                continue
            both = None
            if keys == more_keys and rows[1] == more_rows[0]:
                both = (rows[0], more_rows[1]), keys, sides
            elif rows == more_rows and keys[1] == more_keys[0]:
                both = rows, (keys[0], more_keys[1]), sides
            if both is not None:
                rest = [call for number, call in enumerate(calls) if number not in (at, other)]
                return _joined([*rest, both])
    return calls


def calls(options, dealing, rank, owner):
    """For the queries of a rank and the keys of another: rows and keys by their ranks' own numbers, and the
    mask between them, in as few calls as the mask allows."""
    if rank == owner and options.right == 0 and options.left < 0:
        # Each chunk of a rank is behind those before it.
        every = (0, dealing.count(rank))
        made = [(every, every, (-1, 0))] if every[1] else []
    else:
        made = []
        for at_keys, keys in _placed(dealing, owner):
            for at_rows, rows in _placed(dealing, rank):
                found = _block(options, rows, keys)
                if found is None:
                    continue
                (first, last), (begin, end), sides = found
                of_rank = at_rows + first - rows[0], at_rows + last - rows[0]
                of_owner = at_keys + begin - keys[0], at_keys + end - keys[0]
                made.append((of_rank, of_owner, sides))
        made = _joined(made)
    return [
        (slice(*rows), slice(*keys), dict(causal=sides[1] == 0, window_size=sides))
        for rows, keys, sides in made
    ]


def pays(q, k, options):
    """Whether a ring is faster than a gather, where both compute a call. It hides the transfers, which are as
    long as K and V, and merges O instead; over two GPUs both take as long with four query heads to one of K
    and V. Keys that a window hides it would pass around for nothing."""
    return q.is_cuda and q.shape[2] == k.shape[2] and options.left < 0


class _Passed:
    """Two tensors (batch, rows, heads, head_dim) of each rank in one piece of memory, with rows behind them
    so that all are of one size."""

    def __init__(self, k, v, group, dealing):
        self.group, self.dealing = group, dealing
        self.world, self.rank = place(group)
        self.shapes = [(x.shape[0], dealing.most, *x.shape[2:]) for x in (k, v)]

    def packed(self, *tensors):
        return torch.cat([self.dealing.padded(x, 1).reshape(-1) for x in tensors])

    def views(self, memory, owner):
        """Both tensors of a rank."""
        count = math.prod(self.shapes[0])
        parts = memory[:count], memory[count:]
        return [x.view(of)[:, : self.dealing.count(owner)] for x, of in zip(parts, self.shapes)]

    def sent(self, memory):
        """Begins to pass memory on to the next rank. Returns what `arrived` takes."""
        received = torch.empty_like(memory)
        sends, recvs = [0] * self.world, [0] * self.world
        sends[(self.rank + 1) % self.world] = recvs[self.rank - 1] = len(memory)
        if not len(memory):
            return None, received
        work = dist.all_to_all_single(received, memory, recvs, sends, group=self.group, async_op=True)
        return work, received

    def arrived(self, pending):
        """What the rank before has passed on: here, or on a GPU where the current stream is there."""
        work, received = pending
        finished(work, received, self.group)
        return received


def _each(passed, k, v):
    """The keys and values of this rank, then those of one rank after the other: the next ones are on their
    way while those before are used."""
    owner, pending, own = passed.rank, None, (k, v)
    memory = passed.packed(k, v) if passed.world > 1 else None
    for step in range(passed.world):
        if step:
            memory = passed.arrived(pending)
            owner = (passed.rank - step) % passed.world
            own = passed.views(memory, owner)
        if step + 1 < passed.world:
            pending = passed.sent(memory)
        yield owner, *own


def _merged(q, v, parts):
    """O and LSE of all rows, from those of some rows over different keys."""
    batch, rows, heads, _ = q.shape
    cuts = sorted({0, rows, *(at for own, _, _ in parts for at in (own.start, own.stop))})
    outs, lses = [], []
    for first, end in zip(cuts, cuts[1:]):
        covering = [
            (out[:, first - own.start : end - own.start], lse[..., first - own.start : end - own.start])
            for own, out, lse in parts
            if own.start <= first and end <= own.stop
        ]
        if len(covering) > 1:
            out, lse = merge(*zip(*((out, lse.contiguous()) for out, lse in covering)), dtype=q.dtype)
        elif covering:
            out, lse = covering[0]
        else:
            out = q.new_zeros(batch, end - first, heads, v.shape[-1])
            lse = q.new_full((batch, heads, end - first), -math.inf, dtype=torch.float32)
        outs.append(out)
        lses.append(lse)
    if not outs:
        return q.new_zeros(batch, 0, heads, v.shape[-1]), q.new_zeros(batch, heads, 0, dtype=torch.float32)
    return torch.cat(outs, 1), torch.cat(lses, 2)


def ring(q, k, v, passes, group, dealing, options):
    """(out, lse) of this rank's rows. `passes`: the functions of the forward and the backward."""
    passed = _Passed(k, v, group, dealing)
    parts = []
    for owner, keys, values in _each(passed, k, v):
        for rows, seen, mask in calls(options, dealing, passed.rank, owner):
            out, lse, _ = passes[0](
                q[:, rows],
                keys[:, seen],
                values[:, seen],
                return_attn_probs=True,
                **options.common,
                **mask,
            )
            parts.append((rows, out, lse))
    return _merged(q, v, parts)


def ring_backward(dout, dlse, q, k, v, out, lse, passes, group, dealing, options):
    """(dq, dk, dv) of `ring`. Passes K and V on again: nothing of other ranks is kept."""
    dout = torch.zeros_like(out) if dout is None else dout
    passed, pending = _Passed(k, v, group, dealing), None
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for owner, keys, values in _each(passed, k, v):
        made = []
        for rows, seen, mask in calls(options, dealing, passed.rank, owner):
            gradients = passes[1](
                dout[:, rows],
                q[:, rows],
                keys[:, seen],
                values[:, seen],
                out[:, rows],
                lse[..., rows].contiguous(),
                dlse=None if dlse is None else dlse[..., rows].contiguous(),
                **options.backward,
                **mask,
            )
            dq[:, rows] += gradients[0]
            made.append((seen, gradients[1:]))
        # Sums of ranks before this one come while those of this one are computed.
        if pending is None:
            count = sum(map(math.prod, passed.shapes))
            memory = torch.zeros(count, dtype=torch.float32, device=q.device)
        else:
            memory = passed.arrived(pending)
        for seen, gradients in made:
            for total, part in zip(passed.views(memory, owner), gradients):
                total[:, seen] += part
        if passed.world > 1:
            pending = passed.sent(memory)
    if pending is not None:
        memory = passed.arrived(pending)
    dk, dv = (total.to(x.dtype) for total, x in zip(passed.views(memory, passed.rank), (k, v)))
    return dq.to(q.dtype), dk, dv


class Ring(torch.autograd.Function):
    """`ring` with gradients."""

    @staticmethod
    def forward(ctx, q, k, v, passes, group, dealing, options):
        ctx.given = (passes, group, dealing, options)
        out, lse = ring(q, k, v, *ctx.given)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    @telling(lambda ctx: ctx.given[1])
    def backward(ctx, dout, dlse):
        return *ring_backward(dout, dlse, *ctx.saved_tensors, *ctx.given), None, None, None, None
