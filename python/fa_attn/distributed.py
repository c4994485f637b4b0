"""Attention over several GPUs: sequences whose rows are spread over the ranks of a process group.

Every rank holds some rows of Q, K and V and gets its rows of the output, and of the gradients. All functions
are collective: each rank calls them, in the same order. Transfers are those of the caller's process group:
NCCL on GPUs, gloo on CPUs.

- `attention`: keys and values of some heads are gathered while those before them are computed; nothing is
  merged, so that the output has the bits of one GPU. Gradients of K and V are summed in float32.
- `ulysses_attention`: an exchange turns shards of rows into shards of heads.
- `decode_attention`: few queries on a cache whose keys are spread over ranks; results are merged.
- `zigzag_ring_flash_attn_func`, `ring_flash_attn_func`, `llama3_flash_attn_varlen_func` and their relatives:
  the names and arguments of ring-flash-attention. `UlyssesAttention`: those of yunchang.
- `context_parallel`: as `torch.distributed.tensor.experimental.context_parallel`.
- `shard`, `unshard`, `positions`: the rows of a rank, and where they are in the sequence.

Rows are dealt "zigzag" (of 2 * world chunks rank r has chunks r and 2 * world - 1 - r, so that a causal mask
gives every rank as much to do) or "contiguous" (rank r has chunk r). All ranks have as many rows: where they
have not, the process group fails or waits, and TORCH_DISTRIBUTED_DEBUG=DETAIL lets torch name them.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch.nn import functional

from . import _core
from ._checks import window
from ._core import InputError, UnsupportedError
from ._merging import merge
from .interface import (
    flash_attn_backward,
    flash_attn_func,
    flash_attn_varlen_backward,
    flash_attn_varlen_func,
)
from .serving import flash_attn_with_kvcache

__all__ = [
    "UlyssesAttention",
    "attention",
    "context_parallel",
    "decode_attention",
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "positions",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "shard",
    "ulysses_attention",
    "unshard",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
]

LAYOUTS = ("zigzag", "contiguous")


def _place(group):
    """Ranks of the group, and this one."""
    is_group = group is None or group is dist.GroupMember.NON_GROUP_MEMBER
    if not is_group and not isinstance(group, dist.ProcessGroup):
        raise InputError(
            f"group is of the type {type(group).__name__}: it must be a process group of torch.distributed "
            "(dist.new_group, DeviceMesh.get_group), or None for all ranks"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise InputError("this process is no rank of group: only those of the group make the call")
    return dist.get_world_size(group), rank


def _chunks(layout, world):
    """The chunks of each rank, in the order in which it stores them: those of the crate fa-dist."""
    if not isinstance(layout, str):
        raise InputError(f"layout is {layout!r}: it must be a name, zigzag or contiguous")
    return _core.chunks(layout, world)


# Called by torch.compile where it traces, not traced.
_chunks._dynamo_marked_constant = True


def _chunk_length(rows, per_rank, layout):
    if rows % per_rank:
        raise InputError(
            f"a rank has {rows} rows, which {per_rank} chunks of equal length do not have: pad the sequence "
            f"to a multiple of {per_rank} times the ranks ({layout} shards)"
        )
    return rows // per_rank


def shard(tensor, dim=1, group=None, layout="zigzag"):
    """This rank's rows of a whole tensor."""
    world, rank = _place(group)
    own = _chunks(layout, world)[rank]
    count = world * len(own)
    if not -tensor.dim() <= dim < tensor.dim():
        raise InputError(f"axis {dim} of a tensor of {tensor.dim()} axes")
    if tensor.shape[dim] % count:
        raise InputError(
            f"axis {dim} has {tensor.shape[dim]} rows, which {count} chunks do not divide: pad it, or use "
            "another number of ranks"
        )
    chunks = tensor.chunk(count, dim)
    return torch.cat([chunks[chunk] for chunk in own], dim)


def unshard(tensor, dim=1, group=None, layout="zigzag"):
    """The whole tensor, from each rank's rows. Without gradients."""
    world, _ = _place(group)
    return torch.cat(_in_order(_of_all(tensor.detach(), group, world), dim, layout), dim)


def _of_all(tensor, group, world):
    """The tensors of all ranks, which have one shape."""
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(world)]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def _in_order(parts, dim, layout):
    """The chunks of all ranks' rows, in the order of the sequence."""
    chunks = {}
    for part, own in zip(parts, _chunks(layout, len(parts))):
        _chunk_length(part.shape[dim], len(own), layout)
        chunks.update(zip(own, part.chunk(len(own), dim)))
    return [chunks[chunk] for chunk in sorted(chunks)]


def positions(rows, group=None, layout="zigzag", device=None):
    """The positions in the whole sequence of this rank's `rows` rows: what rotary embedding takes."""
    world, rank = _place(group)
    own = _chunks(layout, world)[rank]
    length = _chunk_length(rows, len(own), layout)
    return torch.cat([torch.arange(c * length, (c + 1) * length, device=device) for c in own])


class _Options:
    """What all parts of a call have in common."""

    def __init__(self, scale, causal, window_size, softcap, deterministic):
        left, right = window(window_size)
        if causal:
            right = 0
        self.causal, self.left = right == 0, left
        if right > 0 or (left >= 0 and right != 0):
            raise UnsupportedError(
                f"window_size is {tuple(window_size)} without causal: over several ranks masks are causal, with "
                "or without a left side, or none; use ulysses_attention"
            )
        self.common = dict(softmax_scale=scale, softcap=softcap)
        self.backward = dict(self.common, deterministic=deterministic)

    def keys(self, first, end, total):
        """The keys that rows `first` to `end` see: their end is the diagonal of the last row."""
        stop = end if self.causal else total
        start = max(0, first - self.left) if self.left >= 0 else 0
        return slice(start, stop)

    @property
    def mask(self):
        return dict(causal=self.causal, window_size=(self.left, 0 if self.causal else -1))


class _Gathered:
    """K and V of all ranks, some heads at a time: the next while those before are used."""

    def __init__(self, k, v, group, layout, stages):
        self.k, self.v, self.group, self.layout = k, v, group, layout
        self.world, heads = dist.get_world_size(group), k.shape[2]
        if stages is None:
            stages = max(count for count in range(1, min(8, heads) + 1) if heads % count == 0)
        if not isinstance(stages, int) or stages < 1 or heads % stages:
            raise InputError(f"stages is {stages}: it must divide the {heads} K/V heads")
        self.size, self.stages = heads // stages, stages

    def __iter__(self):
        pending = self._start(0)
        for stage in range(self.stages):
            work, parts = pending
            if stage + 1 < self.stages:
                pending = self._start(stage + 1)
            for handle in work:
                handle.wait()
            heads = slice(stage * self.size, (stage + 1) * self.size)
            yield heads, *(torch.cat(_in_order(part, 1, self.layout), 1) for part in parts)

    def _start(self, stage):
        heads = slice(stage * self.size, (stage + 1) * self.size)
        work, all_parts = [], []
        for own in (self.k, self.v):
            own = own[:, :, heads].contiguous()
            parts = [torch.empty_like(own) for _ in range(self.world)]
            work.append(dist.all_gather(parts, own, group=self.group, async_op=True))
            all_parts.append(parts)
        return work, all_parts


def _rows(q, group, layout):
    """(own rows, first and last row of the sequence) of each chunk of this rank, the longest keys first."""
    world, rank = _place(group)
    own = _chunks(layout, world)[rank]
    length = _chunk_length(q.shape[1], len(own), layout)
    spans = [
        (slice(at * length, (at + 1) * length), chunk * length, (chunk + 1) * length)
        for at, chunk in enumerate(own)
    ]
    return spans[::-1]


class _Attention(torch.autograd.Function):
    """Gathers again in the backward: nothing of other ranks is kept."""

    @staticmethod
    def forward(ctx, q, k, v, group, layout, stages, options):
        ratio = q.shape[2] // k.shape[2]
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
        for heads, keys, values in _Gathered(k, v, group, layout, stages):
            of = slice(heads.start * ratio, heads.stop * ratio)
            for rows, first, end in _rows(q, group, layout):
                seen = options.keys(first, end, keys.shape[1])
                part, part_lse, _ = flash_attn_func(
                    q[:, rows, of],
                    keys[:, seen],
                    values[:, seen],
                    return_attn_probs=True,
                    **options.common,
                    **options.mask,
                )
                out[:, rows, of], lse[:, of, rows] = part, part_lse
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.given = (group, layout, stages, options)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, _):
        q, k, v, out, lse = ctx.saved_tensors
        group, layout, stages, options = ctx.given
        ratio = q.shape[2] // k.shape[2]
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for heads, keys, values in _Gathered(k, v, group, layout, stages):
            of = slice(heads.start * ratio, heads.stop * ratio)
            sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (keys, values)]
            for rows, first, end in _rows(q, group, layout):
                seen = options.keys(first, end, keys.shape[1])
                made = flash_attn_backward(
                    dout[:, rows, of],
                    q[:, rows, of],
                    keys[:, seen],
                    values[:, seen],
                    out[:, rows, of],
                    lse[:, of, rows].contiguous(),
                    **options.backward,
                    **options.mask,
                )
                dq[:, rows, of] = made[0]
                for total, part in zip(sums, made[1:]):
                    total[:, seen] += part
            for to, total in zip((dk, dv), sums):
                to[:, :, heads] = _summed(total, group, layout)
        return dq, dk, dv, None, None, None, None


def _summed(total, group, layout):
    """This rank's rows of the sum over ranks, in the order of the ranks, by float32."""
    world = dist.get_world_size(group)
    own = _chunks(layout, world)
    chunks = total.chunk(world * len(own[0]), 1)
    sends = torch.stack([torch.cat([chunks[chunk] for chunk in of], 1) for of in own])
    parts = torch.empty_like(sends)
    dist.all_to_all_single(parts, sends, group=group)
    result = parts[0].clone()
    for part in parts[1:]:
        result += part
    return result


def _check(dropout_p, alibi_slopes, **axes):
    if dropout_p != 0.0:
        raise UnsupportedError(f"dropout_p is {dropout_p}: dropout is not computed, leave it out")
    if alibi_slopes is not None:
        raise UnsupportedError("alibi_slopes over several ranks: use ulysses_attention, or one GPU")
    for name, (x, count) in axes.items():
        if not isinstance(x, torch.Tensor):
            raise InputError(f"{name} is of the type {type(x).__name__}: it must be a torch tensor")
        if x.dim() != count:
            raise InputError(f"{name} has the shape {tuple(x.shape)}: it must have {count} axes")
    if axes:
        heads_q, heads_k, heads_v = (x.shape[-2] for x, _ in axes.values())
        if not heads_k or heads_q % heads_k or heads_v != heads_k:
            raise InputError(
                f"q has {heads_q} heads, k {heads_k} and v {heads_v}: k and v need as many, a divisor of q's"
            )


def attention(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    causal=True,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
    group=None,
    layout="zigzag",
    stages=None,
    return_lse=False,
):
    """Attention of this rank's queries over the keys of all ranks.

    q (batch, rows, heads_q, head_dim), k and v (batch, rows, heads_kv, head_dim): this rank's rows, as many
    on every rank. `layout`: how rows are dealt. `stages`: in how many parts the K/V heads are gathered, one
    after the other; a divisor of their number. Returns out, in the shape of q, and with `return_lse`
    (out, lse).
    """
    _place(group)
    _check(0.0, None, q=(q, 4), k=(k, 4), v=(v, 4))
    options = _Options(softmax_scale, causal, window_size, softcap, deterministic)
    if q.shape[1] != k.shape[1] or k.shape[1] != v.shape[1]:
        raise InputError(
            f"q has {q.shape[1]} rows, k {k.shape[1]} and v {v.shape[1]}: a rank's shards are of equal length"
        )
    out, lse = _Attention.apply(q, k, v, group, layout, stages, options)
    return (out, lse) if return_lse else out


def _exchanged(x, group, to_heads):
    """Shards of rows as shards of heads: (batch, rows, heads, d) to (batch, world * rows, heads / world, d),
    or back."""
    world = dist.get_world_size(group)
    batch, rows, heads, dim = x.shape
    if to_heads:
        sends = x.reshape(batch, rows, world, heads // world, dim).permute(2, 0, 1, 3, 4).contiguous()
    else:
        sends = x.reshape(batch, world, rows // world, heads, dim).transpose(0, 1).contiguous()
    parts = torch.empty_like(sends)
    dist.all_to_all_single(parts, sends, group=group)
    if to_heads:
        return parts.transpose(0, 1).reshape(batch, world * rows, heads // world, dim)
    return parts.permute(1, 2, 0, 3, 4).reshape(batch, rows // world, world * heads, dim)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, to_heads):
        ctx.given = (group, to_heads)
        return _exchanged(x, group, to_heads)

    @staticmethod
    def backward(ctx, gradient):
        group, to_heads = ctx.given
        return _Exchange.apply(gradient, group, not to_heads), None, None


def _ordered(x, world, layout, back=False):
    """Rows in the order of ranks put in that of the sequence, or back."""
    if layout == "contiguous":
        return x
    order = [chunk for own in _chunks(layout, world) for chunk in own]
    if not back:
        order = [order.index(chunk) for chunk in range(len(order))]
    chunks = x.chunk(len(order), 1)
    return torch.cat([chunks[chunk] for chunk in order], 1)


def ulysses_attention(q, k, v, *, group=None, layout="contiguous", return_lse=False, **options):
    """Attention of whole sequences for some heads: exchanges turn shards of rows into shards of heads and
    back. The ranks divide the query heads, and the K/V heads or are a multiple of them. `options`: those of
    `flash_attn_func`. Returns out, in the shape of q."""
    _check(0.0, None, q=(q, 4), k=(k, 4), v=(v, 4))
    if return_lse:
        raise UnsupportedError("return_lse of ulysses_attention: the LSE is spread over heads, use attention")
    if options.get("alibi_slopes") is not None:
        raise UnsupportedError("alibi_slopes of ulysses_attention: heads are spread over ranks, leave it out")
    world, _ = _place(group)
    _chunk_length(q.shape[1], len(_chunks(layout, world)[0]), layout)
    heads_q, heads_kv = q.shape[2], k.shape[2]
    if heads_q % world or (heads_kv % world and world % heads_kv):
        raise UnsupportedError(
            f"{heads_q} query heads and {heads_kv} K/V heads over {world} ranks: ulysses needs ranks that "
            "divide them, use attention"
        )
    if heads_kv < world:
        k, v = (x.repeat_interleave(world // heads_kv, 2) for x in (k, v))
    q, k, v = (_ordered(_Exchange.apply(x, group, True), world, layout) for x in (q, k, v))
    out = flash_attn_func(q, k, v, **options)
    return _Exchange.apply(_ordered(out, world, layout, back=True), group, False)


def decode_attention(
    q, k, v, *, cache_seqlens=None, softmax_scale=None, causal=True, softcap=0.0, group=None, return_lse=False
):
    """Attention of the last queries of sequences on keys that are spread over ranks.

    q (batch, seqlen_q, heads_q, head_dim): the same on every rank. k and v (batch, rows, heads_kv, head_dim):
    this rank's keys, which follow those of the ranks before it, as many on every rank. `cache_seqlens` (int32
    (batch,)): how many of them are in use, which may differ between ranks; for one query at a time.
    Results are exchanged once and merged: every rank returns all of out, in the shape of q, and with
    `return_lse` (out, lse). Without gradients.
    """
    world, rank = _place(group)
    _check(0.0, None, q=(q, 4), k=(k, 4), v=(v, 4))
    is_masked = causal and q.shape[1] > 1
    if is_masked and cache_seqlens is not None:
        raise UnsupportedError(
            f"cache_seqlens of decode_attention with {q.shape[1]} causal queries: decode one at a time, or "
            "leave it out"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise UnsupportedError("gradients of decode_attention: use attention, or torch.no_grad()")
    options = dict(softmax_scale=softmax_scale, softcap=softcap, causal=is_masked)
    if is_masked:
        # The diagonal ends at the last key of the last rank.
        options["query_offset"] = (world - 1 - rank) * k.shape[1]
    if cache_seqlens is None:
        own = flash_attn_func(q, k, v, return_attn_probs=True, **options)[:2]
    else:
        options["return_softmax_lse"] = True
        own = flash_attn_with_kvcache(q, k, v, cache_seqlens=cache_seqlens, **options)
    out, lse = merge(*(_of_all(x, group, world) for x in own))
    return (out, lse) if return_lse else out


def _ring(layout, name):
    def function(
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        group=None,
    ):
        """ring-flash-attention's function: q, k and v (batch, rows, heads, head_dim) are this rank's rows,
        dealt {layout}. Keys are gathered heads by heads, not passed around: the results are the same, and
        those of one GPU."""
        _check(dropout_p, alibi_slopes)
        out, lse = attention(
            q,
            k,
            v,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            deterministic=deterministic,
            group=group,
            layout=layout,
            return_lse=True,
        )
        return (out, lse, None) if return_attn_probs else out

    function.__name__ = function.__qualname__ = name
    function.__doc__ = function.__doc__.replace("{layout}", layout)
    return function


def _packed(function, name, axis):
    def packed(*tensors, **options):
        *others, stacked = tensors[:axis]
        return function(*others, *stacked.unbind(2), *tensors[axis:], **options)

    packed.__name__ = packed.__qualname__ = name
    packed.__doc__ = f"`{function.__name__}` of tensors that are stacked along axis 2."
    return packed


zigzag_ring_flash_attn_func = _ring("zigzag", "zigzag_ring_flash_attn_func")
ring_flash_attn_func = _ring("contiguous", "ring_flash_attn_func")
zigzag_ring_flash_attn_kvpacked_func = _packed(
    zigzag_ring_flash_attn_func, "zigzag_ring_flash_attn_kvpacked_func", 2
)
zigzag_ring_flash_attn_qkvpacked_func = _packed(
    zigzag_ring_flash_attn_func, "zigzag_ring_flash_attn_qkvpacked_func", 1
)
ring_flash_attn_kvpacked_func = _packed(ring_flash_attn_func, "ring_flash_attn_kvpacked_func", 2)
ring_flash_attn_qkvpacked_func = _packed(ring_flash_attn_func, "ring_flash_attn_qkvpacked_func", 1)


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
    longest = (max(lengths_q, default=0), max(lengths_k, default=0))
    return accumulated(lengths_q), accumulated(lengths_k), *longest, local


class _Llama3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, starts, longest, stages, local, group, options):
        ratio = q.shape[1] // k.shape[1]
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        for heads, keys, values in _Gathered(k[None], v[None], group, "contiguous", stages):
            of = slice(heads.start * ratio, heads.stop * ratio)
            part, part_lse, _ = flash_attn_varlen_func(
                q[:, of],
                keys[0, local],
                values[0, local],
                *starts,
                *longest,
                return_attn_probs=True,
                **options.common,
                **options.mask,
            )
            out[:, of], lse[of] = part, part_lse
        ctx.save_for_backward(q, k, v, out, lse, *starts)
        ctx.given = (longest, stages, local, group, options)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, _):
        q, k, v, out, lse, *starts = ctx.saved_tensors
        longest, stages, local, group, options = ctx.given
        ratio = q.shape[1] // k.shape[1]
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for heads, keys, values in _Gathered(k[None], v[None], group, "contiguous", stages):
            of = slice(heads.start * ratio, heads.stop * ratio)
            made = flash_attn_varlen_backward(
                dout[:, of],
                q[:, of],
                keys[0, local],
                values[0, local],
                out[:, of],
                lse[of].contiguous(),
                *starts,
                *longest,
                **options.backward,
                **options.mask,
            )
            dq[:, of] = made[0]
            for to, whole, part in ((dk, keys, made[1]), (dv, values, made[2])):
                total = torch.zeros(whole.shape, dtype=torch.float32, device=whole.device)
                total[0, local] = part.float()
                to[:, heads] = _summed(total, group, "contiguous")[0]
        return dq, dk, dv, None, None, None, None, None, None


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
):
    """ring-flash-attention's function for packed sequences: q (rows, heads_q, head_dim), k and v (rows,
    heads_kv, head_dim) are this rank's share of the packed rows; the lengths come from
    `llama3_flash_attn_prepare_cu_seqlens`. `heads_k_stride`: K/V heads that are gathered at a time."""
    _check(dropout_p, alibi_slopes, q=(q, 3), k=(k, 3), v=(v, 3))
    if heads_k_stride < 1 or k.shape[1] % heads_k_stride:
        raise InputError(f"heads_k_stride is {heads_k_stride}: it must divide the {k.shape[1]} K/V heads")
    options = _Options(softmax_scale, causal, window_size, 0.0, deterministic)
    stages = k.shape[1] // heads_k_stride
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    out, lse = _Llama3.apply(q, k, v, starts, longest, stages, local_k_slice, group, options)
    return (out, lse, None) if return_attn_probs else out


def llama3_flash_attn_varlen_kvpacked_func(q, kv, *args, **options):
    """`llama3_flash_attn_varlen_func` of K and V stacked along axis 1."""
    return llama3_flash_attn_varlen_func(q, *kv.unbind(1), *args, **options)


def llama3_flash_attn_varlen_qkvpacked_func(qkv, *args, **options):
    """`llama3_flash_attn_varlen_func` of Q, K and V stacked along axis 1."""
    return llama3_flash_attn_varlen_func(*qkv.unbind(1), *args, **options)


class UlyssesAttention(torch.nn.Module):
    """yunchang's module (DeepSpeed's DistributedAttention): q, k and v (batch, rows, heads, head_dim) are
    this rank's rows, dealt contiguously."""

    def __init__(
        self, sequence_process_group=None, scatter_idx=2, gather_idx=1, use_sync=False, attn_type=None
    ):
        super().__init__()
        if (scatter_idx, gather_idx) != (2, 1):
            raise UnsupportedError(
                f"scatter_idx {scatter_idx} and gather_idx {gather_idx}: heads are axis 2 and rows axis 1"
            )
        if use_sync or attn_type is not None:
            raise UnsupportedError("use_sync and attn_type: transfers are ordered by streams, leave both out")
        self.group = sequence_process_group

    def forward(
        self,
        query,
        key,
        value,
        *others,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
    ):
        _check(dropout_p, alibi_slopes)
        if others or return_attn_probs:
            raise UnsupportedError("return_attn_probs and further arguments: leave them out")
        return ulysses_attention(
            query,
            key,
            value,
            group=self.group,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            deterministic=deterministic,
        )


@contextlib.contextmanager
def context_parallel(mesh, *, buffers=None, buffer_seq_dims=None, no_restore_buffers=None, layout="zigzag"):
    """As `torch.distributed.tensor.experimental.context_parallel`: within it each of `buffers` holds this
    rank's rows along its axis of `buffer_seq_dims`, and `scaled_dot_product_attention` sees the keys of all
    ranks. `mesh`: a device mesh of one axis, or a process group."""
    group = mesh.get_group() if hasattr(mesh, "get_group") else mesh
    buffers, dims = list(buffers or []), list(buffer_seq_dims or [])
    if len(buffers) != len(dims):
        raise InputError(
            f"buffers has {len(buffers)} entries and buffer_seq_dims {len(dims)}: give one axis each"
        )
    kept = no_restore_buffers or set()
    whole = [None if any(x is other for other in kept) else x.detach().clone() for x in buffers]
    plain = functional.scaled_dot_product_attention

    def scaled_dot_product_attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        if attn_mask is not None:
            raise UnsupportedError("attn_mask under context_parallel: use is_causal, or no mask")
        _check(dropout_p, None)
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise InputError(
                f"query has {query.shape[1]} heads and key {key.shape[1]}: give enable_gqa=True to share them"
            )
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = attention(q, k, v, softmax_scale=scale, causal=is_causal, group=group, layout=layout)
        return out.transpose(1, 2)

    with torch.no_grad():
        # All of them or none.
        owns = [shard(x, dim, group, layout).clone() for x, dim in zip(buffers, dims)]
        for x, own in zip(buffers, owns):
            x.resize_(own.shape).copy_(own)
    functional.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain
        with torch.no_grad():
            for x, before in zip(buffers, whole):
                if before is not None:
                    x.resize_(before.shape).copy_(before)
