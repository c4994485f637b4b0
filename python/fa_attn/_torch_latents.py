"""What `fa_attn.flash_mla` needs of torch's tensors; see `fa_attn._latents`."""

from __future__ import annotations

import torch

from ._latents import ROOM
from ._torch_memory import FLOAT


def chosen(indices, rows, lengths):
    """Nothing is read on the host, and entries keep their order."""
    most = indices.shape[1]
    seen = (indices >= 0) & (indices < rows)
    if lengths is not None:
        seen &= torch.arange(most, device=indices.device) < lengths[:, None]
    # What names no row goes to a further column, which is then left out.
    places = torch.where(seen, seen.cumsum(1) - 1, most)
    table = torch.zeros(indices.shape[0], most + 1, dtype=torch.int32, device=indices.device)
    table = table.scatter(1, places, indices.to(torch.int32))[:, :most]
    return table.contiguous(), seen.sum(1, dtype=torch.int32)


def rows_of_pages(cache, table):
    """Pages that follow each other at any distance, as those of one layer among several, are not copied."""
    pages, page = cache.shape[:2]
    if cache.is_contiguous() or not cache.numel():
        return cache.reshape(-1, 1, *cache.shape[2:]), table
    between, own, *inner = cache.stride()
    own = own if page > 1 else between
    if not own or between % own:
        return cache.reshape(-1, 1, *cache.shape[2:]), table
    step = between // own if pages > 1 else page
    rows = cache.as_strided(((pages - 1) * step + page, 1, *cache.shape[2:]), (own, own, *inner))
    table = table if step == page else table // page * step + table % page
    return rows, table


def repeated(lengths, times):
    return lengths[:, None].expand(-1, times).reshape(-1)


def largest_scores(q, rows, table, used, scale):
    tokens, heads, columns = q.shape
    most = table.shape[1]
    largest = torch.full((tokens, heads), -torch.inf, dtype=FLOAT, device=q.device)
    if not (rows.shape[0] and most):
        return largest
    step = max(1, ROOM // (most * columns * FLOAT.itemsize))
    behind = torch.arange(most, device=q.device)
    for part in (slice(at, at + step) for at in range(0, tokens, step)):
        keys = rows[table[part].long()].to(FLOAT)
        scores = torch.einsum("thd,tjd->thj", q[part].to(FLOAT), keys) * scale
        scores.masked_fill_((behind >= used[part, None])[:, None], -torch.inf)
        largest[part] = scores.amax(-1)
    return largest


def sunk(out, lse, sinks, like):
    is_blind = lse == -torch.inf
    share = torch.sigmoid(lse.masked_fill(is_blind, 0.0) - sinks.to(FLOAT)[:, None])
    share = share.masked_fill(is_blind, 0.0).transpose(-1, -2)[..., None]
    return (out.to(FLOAT) * share).to(like.dtype)


def without_blind(lse):
    return lse.masked_fill(lse == -torch.inf, torch.inf)
