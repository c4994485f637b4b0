"""Decoding over ranks: queries on every rank, keys spread over ranks, one exchange of the results."""

from __future__ import annotations

import weakref
from collections import OrderedDict

import torch
import torch.distributed as dist

from . import _core
from . import torch as face
from ._core import InputError, UnsupportedError
from ._merging import PARTS, merge
from ._programs import Program
from ._sharded import Results, check
from ._sharded_peers import agree, has_agreed, of_all, place, together
from .interface import flash_attn_func
from .serving import flash_attn_with_kvcache

# Keys that a query sees where sequences have other lengths on other ranks: all up to one for each query.
_UP_TO = "array fa_last: i32[_];\nmask = k <= q + fa_last[b];"


@together
def decode_attention(
    q,
    k,
    v,
    *,
    cache_seqlens=None,
    page_table=None,
    k_descale=None,
    v_descale=None,
    kv_cache_dtype=None,
    sinks=None,
    softmax_scale=None,
    causal=True,
    softcap=0.0,
    group=None,
    return_lse=False,
):
    """Attention of the last queries of sequences on keys that are spread over ranks.

    q (batch, seqlen_q, heads_q, head_dim): the same on every rank. k and v (batch, rows, heads_kv, head_dim):
    this rank's keys, which follow those of the ranks before it. `cache_seqlens` (an int or int32 (batch,)):
    how many of them are in use, which may differ between ranks; without it all are, as many on every rank.
    `page_table` (int32 (batch, pages of a sequence)): k and v are this rank's pages, (pages, page, heads_kv,
    head_dim), as many as it likes. `k_descale`, `v_descale`, `kv_cache_dtype`: those of a cache of codes, as
    of `flash_attn_with_kvcache`. `sinks`: those of all heads, which join the merged result.
    Results are exchanged once and merged: every rank returns all of out, in the shape of q, and with
    `return_lse` (out, lse). Several causal queries with cache_seqlens exchange the lengths first. Without
    gradients.
    """
    over = dist.group.WORLD if group is None else group
    numbers, cache = (softmax_scale, causal, softcap), (k_descale, v_descale, kv_cache_dtype)
    kind = _kind(q, k, v, cache_seqlens, page_table, numbers, cache, sinks)
    made = None if kind is None else _again(over, kind, q, k, v, cache_seqlens, page_table, cache, sinks)
    if made is not None:
        return made if return_lse else made[0]
    world, rank = place(group)
    check(0.0, q=(q, 4), k=(k, 4), v=(v, 4))
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise UnsupportedError("gradients of decode_attention: use attention, or torch.no_grad()")
    if page_table is not None and cache_seqlens is None:
        raise InputError("page_table without cache_seqlens: give the keys of each sequence on this rank")
    is_masked = causal and q.shape[1] > 1
    options = dict(softmax_scale=softmax_scale, softcap=softcap)
    cache = dict(k_descale=k_descale, v_descale=v_descale, kv_cache_dtype=kv_cache_dtype)
    cache = {name: x for name, x in cache.items() if x is not None}
    shown = sorted([*options.items(), ("causal", is_masked), ("cache", sorted(cache))])
    # Of a cache with lengths each rank has as much room as it likes.
    shapes = (q, k, v) if cache_seqlens is None else (q, k[:0, :0], v[:0, :0])
    agreed = agree(group, *shapes, shown, cache_seqlens is None, page_table is None, sinks is None)
    if cache_seqlens is None:
        # The diagonal ends at the last key of the last rank.
        is_last = rank == world - 1
        is_short = q.shape[1] <= k.shape[1]
        if is_masked and not is_short:
            options.update(query_offset=(world - 1 - rank) * k.shape[1])
        is_masked = is_masked and (is_last or not is_short)
        own = flash_attn_func(q, k, v, return_attn_probs=True, causal=is_masked, **options, **cache)[:2]
    else:
        used = torch.as_tensor(cache_seqlens, dtype=torch.int32, device=q.device).expand(q.shape[0])
        if is_masked:
            options["mask_mod"] = Program(_UP_TO, {"fa_last": _last(used.contiguous(), q.shape[1], group)})
        options.update(page_table=page_table, return_softmax_lse=True, **cache)
        own = flash_attn_with_kvcache(q, k, v, cache_seqlens=used.contiguous(), **options)
    results = Results(own[0].shape, own[0].dtype, own[0], world)
    for to, x in zip((results.out, results.lse), own):
        to.copy_(x)
    results.gather(over)
    out, lse = merge(results.outs, results.lses, sinks)
    if kind is not None and agreed is not None and (cache_seqlens is None or not is_masked):
        _remember(over, kind, (*agreed, is_masked, world, []))
    return (out, lse) if return_lse else out


# By a group's id the group, and its calls that are remembered on GPUs, where the host's time counts: what the
# ranks agreed on, whether there is a mask, the number of ranks, and memory that is free for the next call.
# A group's own hash would take a tenth of a call.
_kinds = {}
_MOST_KINDS = 32


class _Kept:
    """The memory of a call's results, and the function that computes them there."""

    def __init__(self, q, columns, world):
        self.results = results = Results((*q.shape[:-1], columns), q.dtype, q, world)
        self.forward = face.plain_into(lambda *_: results.out, lambda _: results.lse)


def _kind(q, k, v, used, table, numbers, cache, sinks):
    """What calls have in common of which one can follow another without checks; None of others."""
    try:
        if not face.STRIDED is q.layout is k.layout is v.layout or cache[2] is not None:
            return None
        if used is not None and not isinstance(used, torch.Tensor):
            return None
        arrays = (q, k, v, used, table, *cache[:2], sinks)
        of = [None if x is None else (x.shape, x.dtype, x.device) for x in arrays]
    except AttributeError:
        return None
    if face.is_recorded() or any(type(x) not in (bool, float, int, type(None)) for x in numbers):
        return None
    if not (q.dim() == k.dim() == v.dim() == 4) or v.shape[-1] % 8:
        return None
    stream = None
    if q.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return None
        # What is computed on one stream is not overwritten by another.
        stream = torch.cuda.current_stream(q.device).cuda_stream
    # Nor is memory of inference mode written outside of it.
    return (*of, torch.is_inference_mode_enabled(), *numbers, stream)


def _remember(group, kind, known):
    if known[-2] > PARTS:
        return
    of, kinds = _kinds.get(id(group), (None, None))
    if of is None or of() is not group:
        number = id(group)
        kinds = OrderedDict()
        _kinds[number] = weakref.ref(group, lambda _: _kinds.pop(number, None)), kinds
    kinds[kind] = known
    if len(kinds) > _MOST_KINDS:
        kinds.popitem(last=False)


def _again(group, kind, q, k, v, used, table, cache, sinks):
    """(out, lse) of a call that the ranks have made before; None where it needs the long way."""
    of, kinds = _kinds.get(id(group), (None, None))
    if of is None or of() is not group:
        return None
    known = kinds.get(kind)
    if known is None or not has_agreed(*known[:3]):
        return None
    if sinks is not None:
        if sinks.requires_grad and torch.is_grad_enabled():
            return None
        sinks = sinks.detach().to(torch.float32).contiguous()
    is_masked, world, free = known[3:]
    scale, _, softcap, _ = kind[-4:]
    # Another thread takes other memory.
    kept = free.pop() if free else _Kept(q, v.shape[-1], world)
    keywords = dict(k_descale=cache[0], v_descale=cache[1])
    lengths = None if used is None else (None, None, used, table, None, None, None, None, None)
    stream = None if face.ASKS_STREAM else kind[-1]
    call = ((scale, is_masked, (-1, -1), softcap, False), _BOTH, None, (), keywords, 0.0, lengths)
    try:
        made = kept.forward(q, k, v, *call, None, used is not None, None, stream, face.allocate)
    except (InputError, UnsupportedError):
        made = None
    if made is None or made is False:
        free.append(kept)
        return None
    results = kept.results
    results.gather(group)
    out, lse = torch.empty_like(results.out), torch.empty_like(results.lse)
    _core.merge(results.outs, results.lses, out, lse, sinks, stream)
    free.append(kept)
    return out, lse


# The results of a forward: no `out` of the caller's, and LSE.
_BOTH = (None, True, False, False)


def _last(used, queries, group):
    """By this rank's numbers, the last key of each sequence that the first query sees."""
    world, rank = place(group)
    lengths = torch.stack(of_all(used, group, world))
    after = lengths[rank:].sum(0, dtype=torch.int32)
    return (after - queries).to(torch.int32)
