"""Gradients of head dims above 256 on a GPU, which no kernel computes, by torch's products: some queries at a
time, whose scores are computed again from q, k and LSE."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._core import InputError
from ._torch_memory import FLOAT, lse_shape, out_shape
from ._torch_nodes import Nodes, described, joined

_INT = torch.int32
# The head dims that kernels of gradients compute.
_MOST = 256
# Scores that are in memory at a time, of all heads.
_ROOM = 1 << 24
# torch 2.8 and newer.
_HAS_FLOAT_PRODUCTS = "dtype" in torch.ops.aten.bmm.overloads()


def is_wide(q, v, options):
    """Whether the gradients of a call are computed here. Those of latents are refused."""
    return q.is_cuda and not options.latent and max(q.shape[-1], v.shape[-1]) > _MOST


def wide_gradients(dout, q, k, v, out, lse, grads, options, extras, dlse, programs, rooms):
    """Writes the gradients to `grads`, and those of the programs' arrays to `rooms`, pairs of a name and a
    tensor of float32; returns that of the sinks, or None."""
    shapes = dict(out=out_shape(q, v), dout=out_shape(q, v), lse=lse_shape(q))
    for (name, shape), x in zip(shapes.items(), (out, dout, lse)):
        if x.shape != shape:
            raise InputError(f"{name} has the shape {tuple(x.shape)}: it must be {tuple(shape)}")
    scores = _Scores(q, k, options, extras, programs, rooms)
    # Row for row what the softmax takes from dP, with heads before rows.
    sums = (dout.to(FLOAT) * out).sum(-1).transpose(-1, -2)
    sums = sums if dlse is None else sums - dlse
    for one in _sequences(q, k, extras):
        one.of_rows(scores, sums, lse, dout, q, k, v, grads)
    return scores.dsinks


def _sequences(q, k, extras):
    """Those of a call, whose lengths the host reads where they are tensors."""

    def numbers(name):
        found = None if extras is None else getattr(extras, name)
        return None if found is None else found.tolist()

    def spans(starts, used, x):
        """For each sequence where it lies, and its rows in use."""
        if starts is None:
            found = [(at, slice(0, length)) for at, length in enumerate(used or [x.shape[1]] * x.shape[0])]
        else:
            lengths = used or [end - first for first, end in zip(starts, starts[1:])]
            found = [(slice(first, first + length),) for first, length in zip(starts, lengths)]
        return found

    of_q = spans(numbers("cu_seqlens_q"), numbers("seqused_q"), q)
    of_k = spans(numbers("cu_seqlens_k"), numbers("seqused_k"), k)
    return [_Sequence(at, *places) for at, places in enumerate(zip(of_q, of_k))]


class _Sequence(NamedTuple):
    """A sequence's number, and where its rows lie in q and in k."""

    number: int
    in_q: tuple
    in_k: tuple

    def of_rows(self, scores, sums, lse, dout, q, k, v, grads):
        """Writes its gradients."""
        # Of LSE and sums, heads lie before rows.
        *batch, rows_at = self.in_q
        by_heads = (*batch, slice(None), rows_at)
        q, dout, lse, sums = q[self.in_q], dout[self.in_q], lse[by_heads], sums[by_heads]
        k, v = (x[self.in_k].transpose(0, 1) for x in (k, v))
        dq, dk, dv = (x[at] for x, at in zip(grads, (self.in_q, self.in_k, self.in_k)))
        scores.add_sinks(lse, sums)
        rows, heads, keys = len(q), q.shape[1], k.shape[1]
        dk_sum, dv_sum = (torch.zeros(x.shape, dtype=FLOAT, device=q.device) for x in (k, v))
        step = max(16, _ROOM // max(heads * keys, 1))
        for first in range(0, rows, step):
            part = slice(first, min(first + step, rows))
            seen = scores.seen(part, rows, keys)
            if seen.start >= seen.stop:
                dq[part] = 0
                continue
            q_part, dout_part = (_by_groups(x[part], len(k)) for x in (q, dout))
            made = _product(q_part, k[:, seen].mT).view(1, heads, -1, seen.stop - seen.start)
            found = scores.of(made, self.number, part, seen, rows, keys)
            row = (None, slice(None), part, None)
            # A row without keys has an LSE of -inf.
            weights = (found.scores - lse[row].masked_fill(lse[row] == -torch.inf, torch.inf)).exp()
            weights = found.shown(weights)
            given = _product(dout_part, v[:, seen].mT).view(made.shape)
            given = given if found.factor is None else given * found.factor
            dscores = found.shown(weights * (given - sums[row]))
            weights = weights if found.factor is None else found.shown(weights * found.factor)
            scores.add(found, dscores)
            dscores = dscores if found.slope is None else found.shown(dscores * found.slope)
            weights, dscores = (x.to(q.dtype).view(len(k), -1, made.shape[-1]) for x in (weights, dscores))
            dv_sum[:, seen] += _product(weights.mT, dout_part)
            dk_sum[:, seen] += _product(dscores.mT, q_part)
            dq_part = _product(dscores, k[:, seen]) * scores.scale
            dq[part] = dq_part.view(len(k), -1, part.stop - first, q.shape[-1]).flatten(0, 1).transpose(0, 1)
        dk.copy_((dk_sum * scores.scale).transpose(0, 1))
        dv.copy_(dv_sum.transpose(0, 1))


def _by_groups(x, heads_kv):
    """(rows, heads, columns) as (heads_kv, rows of the heads of a group, columns)."""
    return x.transpose(0, 1).unflatten(0, (heads_kv, -1)).flatten(1, 2)


def _product(a, b):
    """The product of matrices of 16 bits, in float32."""
    if _HAS_FLOAT_PRODUCTS and a.is_cuda and a.dtype is not FLOAT:
        return torch.bmm(a, b, out_dtype=FLOAT)
    return a.to(FLOAT) @ b.to(FLOAT)


class _Found(NamedTuple):
    """Scores as the softmax takes them, and where they are hidden, the derivative by what they were made of,
    the factor of probabilities, and the program's nodes, each where there is one."""

    scores: torch.Tensor
    hidden: torch.Tensor | None
    slope: torch.Tensor | None
    factor: torch.Tensor | None
    nodes: Nodes | None

    def shown(self, x):
        """0 where scores are hidden, whatever was computed there."""
        return x if self.hidden is None else x.masked_fill(self.hidden, 0.0)


class _Scores:
    """What a call makes of its products."""

    def __init__(self, q, k, options, extras, programs, rooms):
        self.options, self.group = options, q.shape[-2] // k.shape[-2]
        self.scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
        self.slopes = None if extras is None else extras.alibi_slopes
        texts, arrays, scalars = programs or ((), (), ())
        self.program = described(joined(texts)) if texts else None
        self.arrays, self.scalars, self.rooms = dict(arrays), dict(scalars), dict(rooms or ())
        for room in self.rooms.values():
            room.zero_()
        self.sinks = None if extras is None else extras.sinks
        self.dsinks = None if self.sinks is None else torch.zeros_like(self.sinks)
        left, right = options.window
        self.left, self.right = left, 0 if options.causal else right

    def _offset(self, rows, keys):
        """Keys by which queries lie right of the top left."""
        return keys - rows + (self.options.query_offset or 0)

    def seen(self, part, rows, keys):
        """The keys that some of a part of the rows may see."""
        offset = self._offset(rows, keys)
        first = 0 if self.left < 0 else max(0, part.start + offset - self.left)
        end = keys if self.right < 0 else min(keys, part.stop + offset + self.right)
        return slice(first, end)

    def of(self, products, number, part, seen, rows, keys):
        """The scores of products (1, heads, queries of `part`, keys of `seen`)."""
        heads, device = products.shape[1], products.device

        def numbers(first, end, axis):
            shape = [1] * 4
            shape[axis] = -1
            return torch.arange(first, end, dtype=_INT, device=device).view(shape)

        offset = self._offset(rows, keys)
        h, q, k = numbers(0, heads, 1), numbers(part.start, part.stop, 2), numbers(seen.start, seen.stop, 3)
        distance, hidden, slope = k - q - offset, None, None
        if self.left >= 0:
            hidden = distance < -self.left
        if self.right >= 0:
            hidden = distance > self.right if hidden is None else hidden | (distance > self.right)
        s = products * self.scale
        if self.options.softcap:
            s = torch.tanh(s / self.options.softcap)
            s, slope = s * self.options.softcap, 1 - s * s
        if self.slopes is not None:
            slopes = self.slopes if self.slopes.dim() == 1 else self.slopes[number]
            s = s - slopes.view(1, -1, 1, 1) * distance.abs()
        if self.program is None:
            return _Found(s, hidden, slope, None, None)
        extents = dict(b=number, sq=rows, sk=keys, off=offset)
        variables = {name: torch.full((1,) * 4, x, dtype=_INT, device=device) for name, x in extents.items()}
        variables.update(s=s, h=h, hk=h // self.group, q=q, k=k)
        nodes = Nodes(self.program, self.arrays, self.scalars, variables)
        results = {name: self.program[name] for name in ("mask", "score", "weight", "slope")}
        values = {name: None if at is None else nodes.value(at) for name, at in results.items()}
        if values["mask"] is not None:
            hidden = ~values["mask"] if hidden is None else hidden | ~values["mask"]
        if values["score"] is not None:
            s = values["score"].expand(products.shape)
            slope = values["slope"] if slope is None else slope * values["slope"]
        return _Found(s, hidden, slope, values["weight"], nodes)

    def add_sinks(self, lse, sums):
        """Adds to the gradient of the sinks that of a sequence."""
        if self.sinks is not None:
            shares = (self.sinks[:, None] - lse).exp().masked_fill(lse == -torch.inf, 0.0)
            self.dsinks -= (shares * sums).sum(-1)

    def add(self, found, dscores):
        """Adds to the gradients of the program's arrays those of the scores."""
        for load, by in self.program["gradients"] if self.rooms else ():
            _, operands = self.program["nodes"][load]
            name, indices = found.nodes.place(operands)
            if name not in self.rooms:
                continue
            shape = torch.broadcast_shapes((1,) * 4, *(x.shape for x in indices))
            made = found.shown(dscores * found.nodes.value(by)).sum_to_size(shape)
            room = self.rooms[name]
            room.index_put_(tuple(x.expand(shape) for x in indices), made, accumulate=True)
