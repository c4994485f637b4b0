"""Attention whose keys and values travel from rank to rank: each rank attends to one rank's while the next
ones are on their way. Results are merged by their LSE in float32; gradients of K and V are sent to the rank
whose they are, as kernels make them, which adds them up in float32."""

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
        self.dtype, self.device = k.dtype, k.device

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

    def returned(self, step, made, spans):
        """Begins to send gradients of K and V to the rank whose they are, `step` ranks before this one, and
        to receive those of its own `spans` from as many ranks behind. Returns what `add` takes."""
        counts = [math.prod(shape) // max(shape[1], 1) for shape in self.shapes]
        memory = [x.reshape(-1) for parts in made for x in parts]
        dtype, device = self.dtype, self.device
        memory = torch.cat(memory) if memory else torch.empty(0, dtype=dtype, device=device)
        size = sum(span.stop - span.start for span in spans) * sum(counts)
        received = torch.empty(size, dtype=dtype, device=device)
        if not sum(map(math.prod, self.shapes)):
            return None, received, spans
        sends, recvs = [0] * self.world, [0] * self.world
        sends[self.rank - step], recvs[(self.rank + step) % self.world] = len(memory), size
        work = dist.all_to_all_single(received, memory, recvs, sends, group=self.group, async_op=True)
        return work, received, spans

    def add(self, sums, pending):
        """Adds gradients that have come to the sums of K's and V's."""
        work, received, spans = pending
        finished(work, received, self.group)
        at = 0
        for span in spans:
            for total, (batch, _, *rest) in zip(sums, self.shapes):
                shape = (batch, span.stop - span.start, *rest)
                total.add(span, received[at : at + math.prod(shape)].view(shape))
                at += math.prod(shape)

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
    every = [part for part in parts if part[0] == slice(0, rows)]
    if every:
        _, whole, whole_lse = every[0]
    else:
        whole = q.new_zeros(batch, rows, heads, v.shape[-1])
        whole_lse = q.new_full((batch, heads, rows), -math.inf, dtype=torch.float32)
    for first, end in zip(cuts, cuts[1:]):
        covering = [
            (out[:, first - own.start : end - own.start], lse[..., first - own.start : end - own.start])
            for own, out, lse in parts
            if own.start <= first and end <= own.stop
        ]
        if len(covering) > 1:
            out, lse = merge(*zip(*((out, lse.contiguous()) for out, lse in covering)), dtype=q.dtype)
        elif covering and not every:
            out, lse = covering[0]
        else:
            continue
        if end - first == rows:
            return out, lse
        whole[:, first:end], whole_lse[..., first:end] = out, lse
    return whole, whole_lse


class Sum:
    """The sum of parts of a tensor (batch, rows, heads, head_dim) that each have some rows: in float32, or
    in the tensor's type where no row is in more than two, since one addition is rounded once."""

    def __init__(self, like, spans):
        self.like = like
        most = max((sum(a.start <= b.start < a.stop for a in spans) for b in spans), default=0)
        self.dtype = like.dtype if most <= 2 else torch.float32
        self.total = None

    def add(self, rows, part):
        every = rows == slice(0, self.like.shape[1])
        if self.total is None and every:
            self.total = part.to(self.dtype)
            return
        if self.total is None:
            self.total = torch.zeros_like(
                self.like, dtype=self.dtype, memory_format=torch.contiguous_format
            )
        self.total[:, rows] += part

    def result(self):
        if self.total is None:
            return torch.zeros_like(self.like, memory_format=torch.contiguous_format)
        return self.total.to(self.like.dtype)


class Ring(torch.autograd.Function):
    """(out, lse) of this rank's rows. Passes K and V on again in the backward: nothing of other ranks is
    kept. `passes`: the functions of the forward and the backward."""

    @staticmethod
    def forward(ctx, q, k, v, passes, group, dealing, options):
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
        out, lse = _merged(q, v, parts)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.given = (passes, group, dealing, options)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    @telling(lambda ctx: ctx.given[1])
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        passes, group, dealing, options = ctx.given
        dout = torch.zeros_like(out) if dout is None else dout
        passed = _Passed(k, v, group, dealing)
        world, rank = passed.world, passed.rank
        # Of each step this rank's calls, and those of the rank that computes for its keys.
        own = [calls(options, dealing, rank, (rank - step) % world) for step in range(world)]
        others = [calls(options, dealing, (rank + step) % world, rank) for step in range(world)]
        dq = Sum(q, [rows for made in own for rows, _, _ in made])
        sums = [Sum(x, [seen for made in others for _, seen, _ in made]) for x in (k, v)]
        pending = None
        for step, (_, keys, values) in enumerate(_each(passed, k, v)):
            made = []
            for rows, seen, mask in own[step]:
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
                dq.add(rows, gradients[0])
                made.append(gradients[1:])
            # Those of the step before come while this one's are computed.
            if pending is not None:
                passed.add(sums, pending)
            if step:
                pending = passed.returned(step, made, [seen for _, seen, _ in others[step]])
            else:
                for (_, seen, _), parts in zip(own[0], made):
                    for total, part in zip(sums, parts):
                        total.add(seen, part)
        if pending is not None:
            passed.add(sums, pending)
        dk, dv = (total.result() for total in sums)
        return dq.result(), dk, dv, None, None, None, None
