"""Decoding over ranks: queries on every rank, keys spread over ranks, one exchange of the results."""

from __future__ import annotations

import torch

from ._core import InputError, UnsupportedError
from ._merging import merge
from ._programs import Program
from ._sharded import agree, check, of_all, place, results_of_all, together
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
    agree(group, *shapes, shown, cache_seqlens is None, page_table is None, sinks is None)
    if cache_seqlens is None:
        # The diagonal ends at the last key of the last rank.
        offset = (world - 1 - rank) * k.shape[1] if is_masked else 0
        options.update(causal=is_masked, query_offset=offset, **cache)
        own = flash_attn_func(q, k, v, return_attn_probs=True, **options)[:2]
    else:
        used = torch.as_tensor(cache_seqlens, dtype=torch.int32, device=q.device).expand(q.shape[0])
        if is_masked:
            options["mask_mod"] = Program(_UP_TO, {"fa_last": _last(used.contiguous(), q.shape[1], group)})
        options.update(causal=False, page_table=page_table, return_softmax_lse=True, **cache)
        own = flash_attn_with_kvcache(q, k, v, cache_seqlens=used.contiguous(), **options)
    out, lse = merge(*results_of_all(*own, group, world), sinks)
    return (out, lse) if return_lse else out


def _last(used, queries, group):
    """By this rank's numbers, the last key of each sequence that the first query sees."""
    world, rank = place(group)
    lengths = torch.stack(of_all(used, group, world))
    after = lengths[rank:].sum(0, dtype=torch.int32)
    return (after - queries).to(torch.int32)
