"""What `fa_attn.flash_mla` needs of torch's tensors; see `fa_attn._latents`."""

from __future__ import annotations

import torch

from ._torch_memory import FLOAT


def chosen(indices, rows, lengths):
    seen = (indices >= 0) & (indices < rows)
    if lengths is not None:
        seen &= torch.arange(indices.shape[1], device=indices.device) < lengths[:, None]
    order = torch.argsort(~seen, dim=1, stable=True)
    table = torch.where(seen, indices, 0).gather(1, order)
    return table.to(torch.int32).contiguous(), seen.sum(1).to(torch.int32)


def rows_of_pages(cache):
    return cache.reshape(-1, 1, *cache.shape[2:])


def repeated(lengths, times):
    return lengths.repeat_interleave(times)


def largest_scores(q, rows, table, used, scale):
    largest = torch.full(q.shape[:2], -torch.inf, dtype=FLOAT, device=q.device)
    for index, count in enumerate(used.tolist()):
        if count:
            keys = rows[table[index, :count].long()].to(FLOAT)
            largest[index] = (q[index].to(FLOAT) @ keys.T * scale).amax(-1)
    return largest


def sunk(out, lse, sinks):
    is_blind = lse == -torch.inf
    share = torch.sigmoid(lse.masked_fill(is_blind, 0.0) - sinks.to(FLOAT)[:, None])
    share = share.masked_fill(is_blind, 0.0).transpose(-1, -2)[..., None]
    return (out.to(FLOAT) * share).to(out.dtype)


def without_blind(lse):
    return lse.masked_fill(lse == -torch.inf, torch.inf)
