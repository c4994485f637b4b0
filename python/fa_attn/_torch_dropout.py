"""The generator's state of a call with dropout, and the bits that it stands for. Operators take the state and
make the bits where they are needed, so that nothing of size seqlen_q x seqlen_k is kept for a backward."""

from __future__ import annotations

import re

import torch

from ._core import InputError, UnsupportedError, dropout_bits
from ._dropout import ADVANCE, BITS, halves
from ._modifications import extents_of
from ._torch_memory import stream_of

_LIBRARY = torch.library.Library("fa_attn", "FRAGMENT")
_LIBRARY.define(
    "dropout_state(Tensor q, int threshold, SymInt heads) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def _signed(value):
    return value - 2**64 if value >= 2**63 else value


def _state(q, threshold, heads):
    """int64 (seed, offset, threshold) of torch's generator, which moves on as FlashAttention-2 moves it."""
    if q.device.type != "cuda":
        seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64)
        return torch.cat([seed, torch.tensor([0, threshold])]).to(q.device)
    if torch.cuda.is_current_stream_capturing():
        # A replay draws another seed.
        seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=q.device)
        rest = [torch.full((1,), value, dtype=torch.int64, device=q.device) for value in (0, threshold)]
        return torch.cat([seed, *rest])
    generator = torch.cuda.default_generators[q.device.index]
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + ADVANCE * heads)
    state = torch.tensor([_signed(seed), _signed(offset), threshold], dtype=torch.int64)
    return state.to(q.device, non_blocking=True)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("dropout_state", _state, _key)


@torch.library.register_fake("fa_attn::dropout_state", lib=_LIBRARY)
def _(q, threshold, heads):
    return q.new_empty((3,), dtype=torch.int64)


def _states(info, in_dims, q, threshold, heads):
    """The states of a vmap's elements, as its `randomness` says."""
    if info.randomness not in ("different", "same"):
        raise InputError("dropout_p under torch.vmap: say randomness='different', or 'same' for all elements")
    if info.batch_size == 0:
        return torch.empty((0, 3), dtype=torch.int64, device=q.device), 0
    q = q.select(in_dims[0], 0)
    if info.randomness == "same":
        return torch.ops.fa_attn.dropout_state(q, threshold, heads), None
    states = [torch.ops.fa_attn.dropout_state(q, threshold, heads) for _ in range(info.batch_size)]
    return torch.stack(states), 0


if hasattr(torch.library, "register_vmap"):
    torch.library.register_vmap("fa_attn::dropout_state", _states, lib=_LIBRARY)


def kept(q, extents, threshold, rng_state):
    """The state of a call: torch's, or the caller's (seed, offset)."""
    if hasattr(q, "placements"):
        # The bits depend on the numbers of heads and sequences.
        raise UnsupportedError("q is a DTensor: with dropout_p give local tensors, or leave it out")
    if rng_state is None:
        return torch.ops.fa_attn.dropout_state(q.detach(), threshold, extents.batch * extents.heads)
    if isinstance(rng_state, torch.Tensor):
        if rng_state.dtype not in (torch.int64, torch.uint64) or tuple(rng_state.shape) != (2,):
            raise InputError(
                f"rng_state holds {tuple(rng_state.shape)} {rng_state.dtype}: it must be (2,) int64, the "
                "seed and the offset"
            )
        state = rng_state.detach().view(torch.int64).to(q.device)
        return torch.cat([state, state.new_full((1,), threshold)])
    seed, offset = map(_signed, halves(rng_state))
    return torch.tensor([seed, offset, threshold], dtype=torch.int64).to(q.device, non_blocking=True)


# Where a call that is a part of a larger one begins in it (`Modifications.moved`).
_FIRST = re.compile(r"fa_part_([qk])_")


def with_bits(arrays, scalars, q, k, extras):
    """The arrays of a call's programs by name, with the bits in place of the state: of all queries and keys
    up to the last of the call."""
    first = {found[1]: int(value) for name, value in scalars if (found := _FIRST.match(name))}
    return [(name, _bits(x, first, q, k, extras) if name == BITS else x) for name, x in arrays]


def _bits(state, first, q, k, extras):
    batch, heads, rows, keys = extents_of(q, k, extras)
    # Arrays have elements, also where a rank has no rows.
    rows, keys = max(1, rows + first.get("q", 0)), max(1, keys + first.get("k", 0))
    bits = torch.empty((batch, heads, rows, -(-keys // 32)), dtype=torch.int32, device=q.device)
    if q.device.type == "cuda":
        dropout_bits(bits, state, None, stream_of(q))
    else:
        seed, offset, threshold = state.tolist()
        dropout_bits(bits, None, (seed % 2**64, offset % 2**64, threshold), None)
    return bits
