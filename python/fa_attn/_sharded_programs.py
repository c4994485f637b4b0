"""Calls over ranks whose scores or probabilities the caller changes (biases, masks, functions, dropout): a
rank computes a part, in whose programs queries, keys and heads have the numbers that they have in the
whole."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

from . import torch as face
from ._core import UnsupportedError
from ._dropout import ADVANCE, dropping, numbers_of
from ._modifications import Extents, Modifications, asked
from ._options import MODIFICATIONS, call_options, extras_of
from ._sharded import summed
from ._sharded_peers import of_all, telling, transferred


def modifications(name, q, rows, given):
    """What the keywords of a call make of its scores; None where they change nothing. Biases and masks are
    those of the whole: of all queries, keys and heads."""
    for keyword in given:
        if keyword not in MODIFICATIONS:
            raise UnsupportedError(
                f"{keyword} of {name}: over several ranks it is not computed, leave it out, or use one GPU; "
                f"options besides those of the signature are {', '.join(MODIFICATIONS)}"
            )
    return asked(q, lambda: Extents(q.shape[0], q.shape[2], rows, rows), given)


def with_slopes(mods, options):
    """ALiBi by distances in the whole, behind the soft cap, and what else changes scores; the options are
    left without both."""
    slopes, cap, scalars = options.slopes, options.common["softcap"], ()
    options.slopes = None
    score = "s"
    if cap:
        score, scalars = "fa_cap * tanh(s / fa_cap)", (("fa_cap", float(cap)),)
        options.common["softcap"] = options.backward["softcap"] = 0.0
    at = "b, h" if slopes.dim() == 2 else "h"
    axes = ", ".join("_" * slopes.dim())
    text = f"array fa_slopes: f32[{axes}];\n" + ("scalar fa_cap: f32;\n" if cap else "")
    text += f"score = {score} - fa_slopes[{at}] * abs(q + off - k);"
    own = Modifications((text,), ("fa_slopes",), (slopes.detach().float(),), scalars)
    return own if mods is None else own.joined(mods)


# Biases whose gradients are wanted: kernels add these up where they are read at a call's own numbers.
_OWN = re.compile(r"array (fa_bias|fa_mask): \w+\[_, _, _, _\] grad;\n.*\[b, h, q, k\];$")


def of_part(mods, spans, whole=()):
    """These for a part of a call, of which `spans` are its numbers in the whole by variable; see
    `Modifications.moved`."""
    own = {found[1] for text in mods.texts if (found := _OWN.match(text))}

    def span(axis, size):
        given = spans.get(axis)
        # Of no rows nothing is read, and arrays have elements.
        return slice(None) if given is None or size == 1 or given.start == given.stop else given

    def cut(x):
        return x[tuple(span(axis, size) for axis, size in zip("bhqk", x.shape))]

    arrays = [cut(x) if name in own else x for name, x in zip(mods.names, mods.arrays)]
    return mods.with_arrays(arrays).moved({axis: span.start for axis, span in spans.items()}, whole, _OWN)


class _OfAll(torch.autograd.Function):
    """The rows of all ranks in the order of the sequence, whose gradients are summed by float32."""

    @staticmethod
    def forward(ctx, x, group, dealing):
        ctx.given = group, dealing
        parts = of_all(dealing.padded(x, 1), group, dist.get_world_size(group))
        return torch.cat(dealing.in_order(parts, 1), 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @telling(lambda ctx: ctx.given[0])
    def backward(ctx, gradient):
        group, dealing = ctx.given
        return summed(gradient.float(), group, dealing).to(gradient.dtype), None, None


def computed(q, k, v, mods, parts, spans, group, dealing, options):
    """(out, lse) of this rank's rows. K and V of all ranks are kept for the backward."""
    k, v = (_OfAll.apply(x, group, dealing) for x in (k, v))
    extras = extras_of(alibi_slopes=options.slopes, sinks=options.sinks)
    made = []
    # Of short sequences several parts may begin in the same row.
    for (rows, seen, _, mask), (_, first) in zip(parts, reversed(spans)):
        of_whole = dict(q=slice(first, first + rows.stop - rows.start), k=seen)
        own = of_part(mods, of_whole, dict(sq=dealing.rows, sk=dealing.rows, off=0))
        keys, values, numbers = k[:, seen], v[:, seen], options.numbers(mask)
        made.append(face.attention(q[:, rows], keys, values, numbers, extras, mods=own))
    outs, lses = zip(*reversed(made))
    return torch.cat(outs, 1), torch.cat(lses, 2)


def shown_state(rng_state):
    """What ranks compare of a state of dropout: of a tensor its shape, since each has another device."""
    return rng_state if isinstance(rng_state, torch.Tensor) else str(rng_state)


def dropout_state(q, batch, heads, p, rng_state, group):
    """(seed, offset), int64, of a call of the whole: the first rank's, or the caller's."""
    threshold = numbers_of(p)[1]
    if rng_state is not None:
        mods = dropping(None, q, lambda: Extents(batch, heads, 1, 1), p, rng_state)
        return mods.arrays[0][:2]
    state = torch.ops.fa_attn.dropout_state(q.detach(), threshold, batch * heads)
    first = dist.get_global_rank(group or dist.group.WORLD, 0)
    transferred("broadcast", state, src=first, group=group)
    return state[:2]


def dropped(mods, q, rows, p, rng_state, group):
    """What changes the scores of a call of the whole, of `rows` queries and keys, with dropout."""
    batch, heads = q.shape[0], q.shape[2]
    state = dropout_state(q, batch, heads, p, rng_state, group)
    return dropping(mods, q, lambda: Extents(batch, heads, rows, rows), p, state)


def by_sequence(q, k, v, numbers, given, mods, drop, heads):
    """Attention of whole sequences for some heads: `heads` are the first of them and the number of all. With
    dropout (`drop`: its probability and state) one sequence after the other, as the bits of a head follow
    from its number. `given`: the tensors of the heads."""
    defaults = dict(softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False)
    numbers = call_options(*{**defaults, **numbers, "query_offset": numbers.get("query_offset")}.values())
    if drop is None:
        return face.attention(q, k, v, numbers, extras_of(**given), mods=mods)[0]
    (first, count), (p, state), outs = heads, drop, []
    for at in range(q.shape[0]):
        one = [x[at : at + 1] for x in (q, k, v)]
        own = None if mods is None else of_part(mods, dict(b=slice(at, at + 1)))
        extents = Extents(1, q.shape[2], q.shape[1], k.shape[1])
        moved = state + torch.tensor([0, ADVANCE * (at * count + first)]).to(state.device)
        dropped = dropping(own, one[0], lambda: extents, p, moved)
        of_one = {name: x[at : at + 1] if x.dim() > 1 else x for name, x in given.items()}
        outs.append(face.attention(*one, numbers, extras_of(**of_one), mods=dropped)[0])
    return torch.cat(outs)
