"""FlashInfer's functions beside attention: merges of results, rows of paged caches, bits."""

from __future__ import annotations

from typing import Optional, Tuple, Union

import torch

from ._core import InputError
from ._flashinfer import LOG2_E, caches_of, check_layout, packed_bits, segments, starts_of
from .interface import merge

Tensor = torch.Tensor
Cache = Union[Tensor, Tuple[Tensor, Tensor]]


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> Tuple[Tensor, Tensor]:
    """(out, lse) over two sets of keys: outs (rows, heads, head_dim) and lses (rows, heads) in base 2."""
    return merge_states(torch.stack((v_a, v_b), 1), torch.stack((s_a, s_b), 1))


def merge_states(v: Tensor, s: Tensor) -> Tuple[Tensor, Tensor]:
    """(out, lse) over several sets of keys: v (rows, states, heads, head_dim), s (rows, states, heads) in
    base 2."""
    if v.dim() != 4 or v.shape[:3] != s.shape:
        raise InputError(
            f"v and s have the shapes {tuple(v.shape)} and {tuple(s.shape)}: they must be (rows, states, "
            "heads, head_dim) and v's without its last axis"
        )
    natural = (s.float() / LOG2_E).permute(1, 2, 0)
    out, lse = merge(v.unbind(1), natural.contiguous().unbind(0))
    return out, lse.transpose(0, 1).contiguous().mul_(LOG2_E)


def merge_state_in_place(
    v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Optional[Tensor] = None
) -> None:
    """`merge_state`, written to v and s, where `mask` (rows,) is True."""
    out, lse = merge_state(v, s, v_other, s_other)
    if mask is not None:
        seen = mask.bool()[:, None]
        out, lse = torch.where(seen[..., None], out, v), torch.where(seen, lse, s.float())
    v.copy_(out)
    s.copy_(lse)


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """Keys of each request, of the starts of their pages and the lengths of the last ones."""
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Optional[Tensor] = None,
    positions: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """(request, position) of each of `nnz` new rows, the last ones of `seq_lens` keys; rows behind the last
    request have the request -1 and the position 0. Written to `batch_indices` and `positions` where given."""
    rows = torch.arange(nnz, device=append_indptr.device, dtype=append_indptr.dtype)
    request = torch.searchsorted(append_indptr, rows, right=True) - 1
    is_row = request < seq_lens.shape[0]
    at = request.clamp(0, max(seq_lens.shape[0] - 1, 0))
    place = rows - append_indptr[at + 1] + seq_lens.to(rows.device)[at]
    made = (torch.where(is_row, request, -1).int(), torch.where(is_row, place, 0).int())
    rooms = (batch_indices, positions)
    return tuple(x if room is None else room.copy_(x) for x, room in zip(made, rooms))


def _append(rows, caches, batch_indices, positions, kv_indices, kv_indptr):
    """Writes rows to their places in caches of pages; a row of the request -1 has none."""
    if not batch_indices.numel() or not kv_indices.numel():
        return
    request, place = batch_indices.long(), positions.long()
    for x, cache in zip(rows, caches):
        need = (*request.shape, *cache.shape[2:])
        if place.shape != request.shape or tuple(x.shape) != need:
            have = (tuple(x.shape), tuple(request.shape), tuple(place.shape))
            raise InputError(f"rows, batch_indices and positions have the shapes {have}: rows must be {need}")
    is_row = request >= 0
    if request.device.type == "cpu":
        _check_places(request[is_row], place[is_row], caches[0], kv_indices, kv_indptr)
    # What has no place repeats a row that has one.
    row = torch.where(is_row, torch.arange(request.shape[0], device=request.device), is_row.int().argmax())
    request, place = request[row].clamp(min=0), place[row]
    for x, cache in zip(rows, caches):
        page = cache.shape[1]
        at = (kv_indptr.long()[request] + place // page).clamp(max=kv_indices.shape[0] - 1)
        places = (kv_indices.long()[at], place % page)
        values = x[row].to(cache.dtype)
        cache.index_put_(places, torch.where(_like(is_row.any(), values), values, cache[places]))


def _check_places(request, place, cache, kv_indices, kv_indptr):
    """Refuses rows that have no place in the pages of their requests, where that is known: on the CPU."""
    if not request.numel():
        return
    if int(request.max()) >= kv_indptr.shape[0] - 1:
        have = int(request.max())
        raise InputError(f"batch_indices has {have}: there are {kv_indptr.shape[0] - 1} requests")
    first, end = kv_indptr.long()[request], kv_indptr.long()[request + 1]
    outside = (place < 0) | (place >= (end - first) * cache.shape[1])
    if outside.any():
        at = int(outside.nonzero()[0])
        raise InputError(
            f"positions[{at}] is {int(place[at])}: the pages of request {int(request[at])} hold "
            f"{int((end - first)[at]) * cache.shape[1]} rows"
        )
    pages = kv_indices.long()[(first + place // cache.shape[1]).clamp(max=kv_indices.shape[0] - 1)]
    if not 0 <= int(pages.min()) <= int(pages.max()) < cache.shape[0]:
        raise InputError(f"kv_indices names a page that is none: the cache has {cache.shape[0]}")


def _like(x, values):
    return x.reshape((1,) * values.dim())


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Cache,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes keys and values (rows, heads_kv, head_dim) to a paged cache, at the positions of their requests;
    the pages of these are there already."""
    caches = caches_of(paged_kv_cache, check_layout(kv_layout))
    _append((append_key, append_value), caches, batch_indices, positions, kv_indices, kv_indptr)


def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Optional[Tensor],
    kpe_cache: Optional[Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Writes latents and rotary columns (rows, columns) to caches (pages, page, columns) of pages."""
    given = ((append_ckv, ckv_cache), (append_kpe, kpe_cache))
    rows, caches = zip(*((x, cache) for x, cache in given if cache is not None and x.shape[-1]))
    _append(rows, caches, batch_indices, positions, kv_indices, kv_indptr)


def packbits(x: Tensor, bitorder: str = "big") -> Tensor:
    """Truth values as the bits of bytes, as numpy.packbits."""
    return packed_bits(x.reshape(-1), bitorder)


def segment_packbits(x: Tensor, indptr: Tensor, bitorder: str = "big") -> Tuple[Tensor, Tensor]:
    """(bytes, starts) of the truth values of segments, each of which begins at a byte."""
    host = starts_of("indptr", indptr, x.shape[0])
    made, starts = segments(x[: int(host[-1])], host.diff(), bitorder)
    return made, starts.to(indptr.device, torch.int32)
