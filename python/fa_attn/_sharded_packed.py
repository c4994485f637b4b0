"""Packed sequences over ranks: functions with the names and arguments of ring-flash-attention."""

from __future__ import annotations

import functools

import torch

from ._core import InputError, UnsupportedError
from ._sharded import Dealing, InParts, Options, cast, check, chunk_length, dealt, stacked
from ._sharded_peers import agree, place, together
from .interface import flash_attn_varlen_backward, flash_attn_varlen_func


def llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, causal, rank, world_size):
    """(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice) of a rank: the packed rows are
    dealt evenly, whatever the sequences; `local_k_slice` are the rows of all keys that the rank's see."""
    total = int(cu_seqlens[-1])
    if total % world_size:
        raise InputError(f"{total} packed rows over {world_size} ranks: pad them to a multiple of the ranks")
    length = total // world_size
    first, end = rank * length, (rank + 1) * length
    starts = cu_seqlens.tolist()
    touched = [(a, b) for a, b in zip(starts, starts[1:]) if max(a, first) < min(b, end)]
    lengths_q = [min(b, end) - max(a, first) for a, b in touched]
    lengths_k = [(min(b, end) if causal else b) - a for a, b in touched]
    begin = touched[0][0] if touched else first

    def accumulated(lengths):
        sums = torch.tensor([0, *lengths]).cumsum(0)
        return sums.to(dtype=cu_seqlens.dtype, device=cu_seqlens.device)

    local = slice(begin, begin + sum(lengths_k))
    longest = (max([0, *lengths_q]), max([0, *lengths_k]))
    return accumulated(lengths_q), accumulated(lengths_k), *longest, local


_PASSES = (flash_attn_varlen_func, flash_attn_varlen_backward)

# Bytes of K and V of all ranks that are gathered in one transfer, which is faster than several.
_AT_ONCE = 1 << 29


def _mask(options):
    return dict(causal=options.causal, window_size=(options.left, options.right))


def _options(scale, causal, window_size, softcap, deterministic, alibi_slopes, q):
    options = Options(scale, causal, window_size, softcap, deterministic, alibi_slopes)
    options.check_shapes(None, q.shape[1])
    if alibi_slopes is not None and not options.causal:
        raise UnsupportedError(
            "alibi_slopes without causal, of packed sequences over several ranks: give causal=True, or use "
            "attention for each sequence"
        )
    if not options.causal and (options.left >= 0 or options.right >= 0):
        # The diagonal of a part would end elsewhere in each sequence.
        raise UnsupportedError(
            f"window_size is {tuple(window_size)} without causal, of packed sequences over several ranks: "
            "give causal=True, or use attention for each sequence"
        )
    return options


@functools.lru_cache(maxsize=8)
def _parts(starts, max_seqlen, total, ranks, layout, causal, device):
    """For each chunk of this rank its rows of all sequences, the rows of all ranks that they see, and the
    lengths of both, the longest first. `starts`: where this rank's rows of each sequence begin. The layers of
    a model ask for the same."""
    world, rank = ranks
    owned = dealt(layout, world)
    starts = list(starts)
    if starts[0] != 0 or starts[-1] != total or sorted(starts) != starts:
        raise InputError(f"cu_seqlens is {starts}: it must ascend from 0 to the {total} rows of this rank")
    if max_seqlen < max([0, *(b - a for a, b in zip(starts, starts[1:]))]):
        raise InputError(f"max_seqlen is {max_seqlen}: a sequence of cu_seqlens, {starts}, has more rows")
    per_rank = len(owned[0])
    lengths = [chunk_length(b - a, per_rank, layout) for a, b in zip(starts, starts[1:])]
    homes = {chunk: (j, at) for j, own in enumerate(owned) for at, chunk in enumerate(own)}

    def rows(owners):
        """Rows of a sequence after the other, and where the sequences begin."""
        spans = [
            torch.arange(length) + j * total + start + at * length
            for start, length in zip(starts, lengths)
            for j, at in owners
        ]
        sums = torch.tensor([0, *(len(owners) * length for length in lengths)]).cumsum(0)
        index = torch.cat([torch.arange(0), *spans])
        return index.to(device), sums.to(dtype=torch.int32, device=device)

    parts, longest = [], max([0, *lengths])
    for at, chunk in reversed(list(enumerate(owned[rank]))):
        owners = [homes[other] for other in range(chunk + 1 if causal else len(homes))]
        own, starts_q = rows([(0, at)])
        seen, starts_k = rows(owners)
        parts.append((own, seen, (starts_q, starts_k, longest, len(owners) * longest)))
    return parts


def _computed(q, k, v, parts, group, stages, options):
    # K and V are gathered as they lie, rank after rank: `parts` know where the rows of a sequence are.
    parts = [(*part, _mask(options)) for part in parts]
    q, k, v = cast(q, k, v)
    world, _ = place(group)
    dealing = Dealing("contiguous", world, k.shape[0] * world)
    return InParts.apply(q, k, v, None, _PASSES, parts, group, dealing, stages, options)


@together
def llama3_flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    heads_k_stride,
    local_k_slice,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    group=None,
    softcap=0.0,
):
    """ring-flash-attention's function for packed sequences: q (rows, heads_q, head_dim), k and v (rows,
    heads_kv, head_dim) are this rank's share of the packed rows; the lengths come from
    `llama3_flash_attn_prepare_cu_seqlens`. `heads_k_stride`: K/V heads that are gathered at a time,
    where all of them would take more than half a GiB. `softcap`: as of `flash_attn_func`."""
    check(dropout_p, q=(q, 3), k=(k, 3), v=(v, 3))
    if heads_k_stride < 1 or k.shape[1] % heads_k_stride:
        raise InputError(f"heads_k_stride is {heads_k_stride}: it must divide the {k.shape[1]} K/V heads")
    options = _options(softmax_scale, causal, window_size, softcap, deterministic, alibi_slopes, q)
    stages = k.shape[1] // heads_k_stride
    if place(group)[0] * (k.numel() * k.element_size() + v.numel() * v.element_size()) <= _AT_ONCE:
        stages = 1
    agree(group, q, k, v, stages, options)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    parts = [(slice(None), local_k_slice, lengths)]
    out, lse = _computed(q, k, v, parts, group, stages, options)
    return (out, lse, None) if return_attn_probs else out


llama3_flash_attn_varlen_kvpacked_func, llama3_flash_attn_varlen_qkvpacked_func = stacked(
    llama3_flash_attn_varlen_func, 1
)


def _ring(layout, name):
    @together
    def function(
        q,
        k,
        v,
        cu_seqlens,
        max_seqlen,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        group=None,
    ):
        """ring-flash-attention's function for packed sequences: q, k and v (rows, heads, head_dim) are this
        rank's rows of each sequence, dealt {layout}; `cu_seqlens` says where they begin, the same on every
        rank, and is read on the host. Keys are gathered, not passed around."""
        check(dropout_p, q=(q, 3), k=(k, 3), v=(v, 3))
        options = _options(softmax_scale, causal, window_size, 0.0, deterministic, alibi_slopes, q)
        if q.shape[0] != k.shape[0] or k.shape[0] != v.shape[0]:
            raise InputError(
                f"q has {q.shape[0]} rows, k {k.shape[0]} and v {v.shape[0]}: a rank has as many of each"
            )
        starts = tuple(cu_seqlens.tolist())
        agree(group, q, k, v, layout, options, starts)
        parts = _parts(starts, max_seqlen, q.shape[0], place(group), layout, options.causal, q.device)
        out, lse = _computed(q, k, v, parts, group, 1, options)
        return (out, lse, None) if return_attn_probs else out

    function.__doc__ = function.__doc__.replace("{layout}", layout)
    function.__name__ = function.__qualname__ = f"{name}_varlen_func"
    return function, *stacked(function, 1)


(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _ring("zigzag", "zigzag_ring_flash_attn")
(
    ring_flash_attn_varlen_func,
    ring_flash_attn_varlen_kvpacked_func,
    ring_flash_attn_varlen_qkvpacked_func,
) = _ring("contiguous", "ring_flash_attn")
