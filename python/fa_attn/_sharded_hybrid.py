"""Ulysses within ring (USP): the classes and functions of yunchang (long-context-attention), by name and
arguments. Ranks form a grid: those of a Ulysses group exchange rows for heads, those of a ring group have
other rows of the same heads."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ._core import InputError, UnsupportedError
from ._dropout import ADVANCE
from ._sharded import Options, check, shard
from ._sharded_peers import agree, place, transferred
from ._sharded_programs import dropout_state, shown_state

_groups = {}


def set_seq_parallel_pg(sp_ulysses_degree, sp_ring_degree, rank, world_size, use_ulysses_low=True):
    """Makes the groups of `LongContextAttention`, for every rank: each block of `sp_ulysses_degree *
    sp_ring_degree` ranks is a grid, of which neighbours are of one Ulysses group (`use_ulysses_low`), or else
    of one ring group."""
    size = sp_ulysses_degree * sp_ring_degree
    if size < 1 or world_size % size:
        raise InputError(
            f"world_size is {world_size} and the degrees {sp_ulysses_degree} and {sp_ring_degree}: their "
            "product must divide it"
        )
    low, high = sp_ulysses_degree, sp_ring_degree
    if not use_ulysses_low:
        low, high = high, low
    made = {}
    for first in range(0, world_size, size):
        grid = [list(range(first + row * low, first + (row + 1) * low)) for row in range(high)]
        for name, members in (("low", grid), ("high", [list(ranks) for ranks in zip(*grid)])):
            # Every process makes every group.
            for ranks in members:
                group = dist.new_group(ranks)
                if rank in ranks:
                    made[name] = group
    ulysses, ring = ("low", "high") if use_ulysses_low else ("high", "low")
    _groups.update(ulysses=made[ulysses], ring=made[ring])


def _extract(deal):
    def extract_local(value, rank, world_size, rd, ud, dim=1, **_):
        """This rank's rows of a whole tensor: those of its ring group, of which each rank of its Ulysses
        group has a part."""
        if not _groups:
            raise InputError("no groups are set: call set_seq_parallel_pg first")
        (ring, own), (ulysses, _part) = (place(_groups[name]) for name in ("ring", "ulysses"))
        if (ring, ulysses) != (rd, ud):
            raise InputError(f"rd and ud are {rd} and {ud}: the groups have {ring} and {ulysses} ranks")
        if value.shape[dim] % (ring * ulysses):
            raise InputError(
                f"axis {dim} has {value.shape[dim]} rows, which {ring * ulysses} ranks do not divide: pad it"
            )
        return shard(deal(value, dim, own, ring), dim, _groups["ulysses"], "contiguous").contiguous()

    return extract_local


def _striped(value, dim, own, ring):
    return value.movedim(dim, 0)[own::ring].movedim(0, dim)


basic_extract_local = _extract(lambda value, dim, own, ring: shard(value, dim, _groups["ring"], "contiguous"))
zigzag_extract_local = _extract(lambda value, dim, own, ring: shard(value, dim, _groups["ring"], "zigzag"))
stripe_extract_local = _extract(_striped)
EXTRACT_FUNC_DICT = dict(basic=basic_extract_local, zigzag=zigzag_extract_local, strip=stripe_extract_local)


_KINDS = ("fa", "fa3", "flashinfer", "torch_math", "torch_flash", "torch_efficient", "torch_cudnn")


def check_kind(attn_type):
    """yunchang's names of what computes attention, where that is the same attention."""
    kind = getattr(attn_type, "value", attn_type)
    if kind is not None and kind not in _KINDS:
        raise UnsupportedError(f"attn_type is {kind!r}: fa computes attention itself, leave it out")


class LongContextAttention(torch.nn.Module):
    """yunchang's module: q, k and v (batch, rows, heads, head_dim) are this rank's rows, as
    `EXTRACT_FUNC_DICT[ring_impl_type]` deals them. The ranks of a Ulysses group divide the query heads, and
    the K/V heads or are a multiple of them. `alibi_slopes`: those of all heads."""

    _STACKED = None

    def __init__(
        self,
        scatter_idx=2,
        gather_idx=1,
        ring_impl_type="basic",
        use_pack_qkv=False,
        use_sync=False,
        attn_type=None,
        attn_processor=None,
    ):
        super().__init__()
        heads = 2 if self._STACKED is None else 3
        if (scatter_idx, gather_idx) != (heads, 1):
            raise UnsupportedError(
                f"scatter_idx {scatter_idx} and gather_idx {gather_idx}: heads are axis {heads}, rows axis 1"
            )
        if use_pack_qkv or use_sync or attn_processor is not None:
            raise UnsupportedError(
                "use_pack_qkv, use_sync and attn_processor: transfers are ordered by streams, leave them out"
            )
        check_kind(attn_type)
        if ring_impl_type not in EXTRACT_FUNC_DICT:
            raise UnsupportedError(
                f"ring_impl_type is {ring_impl_type!r}: it must be one of {', '.join(EXTRACT_FUNC_DICT)}"
            )
        if not _groups:
            raise InputError("no groups are set: call set_seq_parallel_pg first")
        self.ulysses_pg, self.ring_pg = _groups["ulysses"], _groups["ring"]
        self.ring_impl_type = ring_impl_type

    def forward(
        self,
        query,
        key,
        value,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
    ):
        if return_attn_probs:
            raise UnsupportedError("return_attn_probs of a grid: the LSE is spread over heads, leave it out")
        check(0.0, query=(query, 4), key=(key, 4), value=(value, 4))
        options = Options(softmax_scale, causal, window_size, softcap, deterministic, alibi_slopes)
        groups = self.ulysses_pg, self.ring_pg
        return over_grid(query, key, value, groups, self.ring_impl_type, options, (dropout_p, None))


def over_grid(q, k, v, groups, kind, options, dropout):
    """Attention over a grid of ranks: those of the first group exchange rows for heads, those of the second
    have other rows of the same heads, dealt as `kind` says: a name of `EXTRACT_FUNC_DICT`, or "interleaved"
    of rows that are dealt zigzag to all ranks of the grid, those of the first group next to each other.
    `dropout`: its probability, and the state of one GPU that drops the same; without one the first rank's."""
    # Which imports this file.
    from . import distributed as over

    (ulysses, ring), (p, state) = groups, dropout
    world, rank = place(ulysses)
    heads_q, heads_kv = q.shape[2], k.shape[2]
    if heads_q % world or (heads_kv % world and world % heads_kv):
        raise UnsupportedError(
            f"{heads_q} query heads and {heads_kv} K/V heads over {world} ranks of a Ulysses group, "
            "which must divide them: use fewer, and more of a ring group"
        )
    if kind == "strip" and (options.common["softcap"] or p):
        raise UnsupportedError("softcap and dropout of stripes: use ring_impl_type='zigzag'")
    agree(ulysses, q, k, v, kind, options, p, shown_state(state))
    options.check_shapes(q.shape[0], heads_q)
    first = rank * heads_q // world
    given = options.of(slice(first, (rank + 1) * heads_q // world))
    if p:
        state = _state_of_all(q, p, state, groups)
    if heads_kv < world:
        k, v = (x.repeat_interleave(world // heads_kv, 2) for x in (k, v))
    q, k, v = (over.exchanged(x, ulysses) for x in (q, k, v))
    if kind == "interleaved":
        q, k, v = (over._ordered(x, world, "zigzag") for x in (q, k, v))
    numbers = dict(options.backward, causal=options.causal, group=ring)
    numbers["window_size"] = (options.left, options.right)

    def computed(q, k, v, given, **dropped):
        if kind == "strip":
            del numbers["softcap"]
            return over.stripe_flash_attn_func(q, k, v, **numbers, **given)
        layout = "contiguous" if kind == "basic" else "zigzag"
        return over.attention(q, k, v, layout=layout, **numbers, **given, **dropped)

    if not p:
        out = computed(q, k, v, given)
    else:
        # The bits of a head follow from its number among those of all sequences.
        outs = []
        for at in range(q.shape[0]):
            one = [x[at : at + 1] for x in (q, k, v)]
            own = {name: x[at : at + 1] if x.dim() > 1 else x for name, x in given.items()}
            moved = state + torch.tensor([0, ADVANCE * (at * heads_q + first)]).to(state.device)
            outs.append(computed(*one, own, dropout_p=p, rng_state=moved))
        out = torch.cat(outs)
    if kind == "interleaved":
        out = over._ordered(out, world, "zigzag", back=True)
    return over.exchanged(out, ulysses, back=True)


def _state_of_all(q, p, state, groups):
    """(seed, offset) of a call of the whole: that of the grid's first rank, or the caller's."""
    ulysses, ring = groups
    found = dropout_state(q, q.shape[0], q.shape[2], p, state, ring)
    if state is None:
        found = found.contiguous()
        transferred("broadcast", found, src=dist.get_global_rank(ulysses, 0), group=ulysses)
    return found


# Transfers are asynchronous anyway.
AsyncLongContextAttention = LongContextAttention


class LongContextAttentionQKVPacked(LongContextAttention):
    """`LongContextAttention` of (batch, rows, 3, heads, head_dim)."""

    _STACKED = 2

    def __init__(
        self, scatter_idx=3, gather_idx=1, ring_impl_type="basic", use_sync=False, attn_type=None
    ):
        super().__init__(scatter_idx, gather_idx, ring_impl_type, False, use_sync, attn_type)

    def forward(self, qkv, *args, **options):
        return super().forward(*qkv.unbind(self._STACKED), *args, **options)
