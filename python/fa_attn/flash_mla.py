"""FlashMLA's functions: multi-head latent attention (MLA) on a cache of rows that all heads share.

A row of the cache is a key; its first `head_dim_v` columns, the latent, are also the value. DeepSeek's rows
have 576 columns, 512 of the latent and 64 that rotary embedding turned; queries have as many, in that order,
for each of up to 128 heads. Names, arguments, layouts and results are FlashMLA's, and so are two conventions
that other functions here do not have: the default scale is that of the rows, 1 / sqrt(576), although models
have that of their heads before absorption (192 ** -0.5 for DeepSeek), and LSE is +inf for a row that sees no
key (`fa_attn.merge` takes parts with either). Any page size, number of heads and of columns; arrays of
numpy, torch and other libraries, of float16 and bfloat16, on the CPU also float32. There are no gradients.

On a GPU of compute capability 9.0 a kernel reads the rows where they lie, with values of up to 512 columns,
nothing is read on the host, and calls can be captured; other GPUs have no such kernel, and an error says so.
Rows that `indices` names are pages of one row. Rows of codes alone (`is_fp8_kvcache`, a byte for each column)
are read where they lie as well. Packed rows with scales of their own are first copied by the array library's
operations as numbers of q's type, once for each token that sees them, or all of a small cache: of 656 bytes
read 1152 are written and read again, beside float32 numbers in between.

>>> from fa_attn.flash_mla import flash_mla_with_kvcache, get_mla_metadata
>>> meta, _ = get_mla_metadata()
>>> out, lse = flash_mla_with_kvcache(
...     q, cache, block_table, cache_seqlens, 512, meta, softmax_scale=192**-0.5, causal=True)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Dict, Optional, Tuple

from ._checks import (
    array,
    capacity_of,
    check_out,
    check_within_cache,
    count,
    flag,
    lengths_of,
    surely,
    upper_bound,
)
from ._codes import holds_codes
from ._core import InputError, InputTypeError, UnsupportedError
from ._faces import face_of
from ._latents import ROOM
from ._merging import merge
from ._options import call_options, extras_of
from ._packed_rows import one_number
from ._types import A, Array

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "gather_rows",
    "get_mla_metadata",
]


@dataclass
class FlashMLASchedMeta:
    """What calls on the same lengths have in common, of `get_mla_metadata`: the first call that gets it sets
    it, and later ones are checked against that."""

    config: Optional[Dict[str, Any]] = None
    plans: Dict[Tuple[int, int], Any] = field(default_factory=dict, repr=False)

    def check(self, **call: Any) -> None:
        if self.config is None:
            self.config = call
        for name, have in call.items():
            need = self.config[name]
            if need is not have and surely(need != have):
                raise InputError(
                    f"tile_scheduler_metadata is of calls with {name} = {need}, this one has {have}: take "
                    "another of get_mla_metadata"
                )


def get_mla_metadata(*arguments: Any, **options: Any) -> Tuple[FlashMLASchedMeta, None]:
    """(metadata, None) for the calls of a step, one for each layer. FlashMLA's arguments, of this and of
    older versions (cache_seqlens, heads, ..), are not needed: the first call sets them."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: A,
    k_cache: Array,
    block_table: Optional[Array],
    cache_seqlens: Optional[Array],
    head_dim_v: int,
    tile_scheduler_metadata: Optional[FlashMLASchedMeta] = None,
    num_splits: None = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Optional[Array] = None,
    attn_sink: Optional[Array] = None,
    extra_k_cache: Optional[Array] = None,
    extra_indices_in_kvcache: Optional[Array] = None,
    topk_length: Optional[Array] = None,
    extra_topk_length: Optional[Array] = None,
    descale_q: Optional[Array] = None,
    descale_k: Optional[Array] = None,
    out: Optional[A] = None,
    cu_seqlens_q: Optional[Array] = None,
    max_seqlen_q: Optional[int] = None,
) -> Tuple[A, A]:
    """(out, lse) of new tokens on their sequences' rows, or on those that `indices` names.

    q (batch, seqlen_q, heads_q, head_dim), k_cache (pages, page, heads_kv, head_dim), of which the first
    `head_dim_v` columns are the values. `block_table`: int32 (batch, pages of a sequence); `cache_seqlens`:
    int32 (batch,), rows of each sequence, with those of the new tokens. `causal`: aligned to the bottom
    right. `indices`: int32 (batch, seqlen_q, topk), for each token the rows that it sees, page * page size +
    place, instead of block_table and cache_seqlens; an entry that is no row of the cache names none, as do
    those from `topk_length` (batch,) on. `extra_k_cache`, `extra_indices_in_kvcache`, `extra_topk_length`: a
    second cache and the rows that each token sees of it. `attn_sink`: float32 (heads_q,), a logit that joins
    the denominators of out, not lse.

    `is_fp8_kvcache`: the caches are bytes (float8_e4m3fn or uint8) of rows, in one of three forms. 656
    bytes (DeepSeek-V3.2): 512 codes, a float32 scale for each 128 of them, 64 bfloat16. 584 (V4, whose 512
    columns are all values): for the rows of a page 448 codes and 64 bfloat16 each, then for each row 7 scales
    in e8m0, of 64 codes, and a byte that is not used. As many as q has columns: codes alone (of a cache of
    float8_e5m2 those), times `descale_k`, float32 of one element; q may then be codes of e4m3, too, times
    `descale_q`, and out is bfloat16, beside other arrays than torch's in uint8 float32.

    `cu_seqlens_q`: int32 (batch + 1,), where each sequence's tokens begin in a q (total_q, heads_q, head_dim),
    as in prefill by chunks; `max_seqlen_q`: an upper bound on their numbers. out is then (total_q, heads_q,
    head_dim_v) and lse (heads_q, total_q). All rows in codes that the sequences see are then copied at once.

    `out`: an array of the result's shape and type, to which it is written. Returns out (batch, seqlen_q,
    heads_q, head_dim_v) and lse float32 (batch, heads_q, seqlen_q).
    """
    face = face_of(array("q", q))
    batch, longest = _sequences(q, cu_seqlens_q, max_seqlen_q, indices)
    _check_axes("k_cache", k_cache, 4, "(pages, page, heads, head_dim)")
    is_packed = flag("is_fp8_kvcache", is_fp8_kvcache)
    q = _in_numbers(face, q, is_packed, descale_q, descale_k)
    if num_splits is not None:
        raise InputError("num_splits: how keys are divided is in tile_scheduler_metadata, give None")
    metadata = tile_scheduler_metadata
    if metadata is None:
        metadata = FlashMLASchedMeta()
    if not isinstance(metadata, FlashMLASchedMeta):
        kind = type(metadata).__name__
        raise InputTypeError(f"tile_scheduler_metadata is {kind}: it must be what get_mla_metadata gives")
    numbers = _numbers(softmax_scale, q, causal)
    codes = _codes_alone(q, k_cache) if is_packed else None
    packed, descales = None, {}
    if codes is not None:
        numbers, descales = numbers._replace(kv_dtype=codes), _descales(face, k_cache, descale_k)
    elif is_packed:
        packed = face.packed_rows("k_cache", k_cache, q.dtype, descale_k)
    columns = _columns(q, k_cache if packed is None else packed, "k_cache", head_dim_v, codes)
    metadata.check(
        batch=batch,
        seqlen_q=longest,
        heads_q=q.shape[-2],
        page_size=k_cache.shape[1],
        heads_kv=k_cache.shape[2],
        causal=numbers.causal,
        topk=None if indices is None else indices.shape[-1],
    )
    tokens, cache = _without_gradients(face, q=q, k_cache=k_cache)
    cache = (cache if codes is None else face.bits(cache)) if packed is None else packed
    if indices is None:
        of_indices = {
            "extra_k_cache": extra_k_cache,
            "extra_indices_in_kvcache": extra_indices_in_kvcache,
            "topk_length": topk_length,
            "extra_topk_length": extra_topk_length,
        }
        for name, value in of_indices.items():
            if value is not None:
                raise InputError(f"{name} without indices: it belongs to them, leave it out")
        if block_table is None or cache_seqlens is None:
            raise InputError("block_table and cache_seqlens are missing: give both, or indices")
        lengths_of("cache_seqlens", cache_seqlens, batch)
        table = face.contiguous(array("block_table", block_table))
        sequences = extras_of(
            cu_seqlens_q=cu_seqlens_q, seqused_k=cache_seqlens, max_seqlen_q=longest, **descales
        )
        made, lse = _on_pages(face, tokens, cache, columns, numbers, table, sequences, metadata.plans)
    else:
        if numbers.causal:
            raise InputError("causal with indices: they say which rows a token sees, leave it out")
        named = ("indices", indices, topk_length)
        made, lse = _on_indices(face, tokens, cache, columns, numbers, named, descales)
        if (extra_k_cache is None) != (extra_indices_in_kvcache is None):
            raise InputError("extra_k_cache and extra_indices_in_kvcache belong together: give both")
        if extra_k_cache is not None:
            _check_axes("extra_k_cache", extra_k_cache, 4, "(pages, page, heads, head_dim)")
            (cache,) = _without_gradients(face, extra_k_cache=extra_k_cache)
            more_codes = _codes_alone(q, extra_k_cache) if is_packed else None
            if is_packed and more_codes is None:
                cache = face.packed_rows("extra_k_cache", extra_k_cache, q.dtype, None)
            _columns(q, cache, "extra_k_cache", head_dim_v, more_codes)
            cache = cache if more_codes is None else face.bits(cache)
            named = ("extra_indices_in_kvcache", extra_indices_in_kvcache, extra_topk_length)
            of_more = numbers._replace(kv_dtype=more_codes)
            more, more_lse = _on_indices(face, tokens, cache, columns, of_more, named, {})
            # The sink comes after: rounded once.
            made, lse = merge([made, more], [lse, more_lse], dtype=None if attn_sink is None else lse.dtype)
            made, lse = _finished(face, made, lse, attn_sink, more)
            return _written(face, made, out), lse
    made, lse = _finished(face, made, lse, attn_sink, made)
    return _written(face, made, out), lse


def flash_mla_sparse_fwd(
    q: A,
    kv: Array,
    indices: Array,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Optional[Array] = None,
    topk_length: Optional[Array] = None,
    indexer_topk: int = 0,
    return_max_logits: bool = True,
    out: Optional[A] = None,
) -> Tuple[Any, ...]:
    """(out, max_logits, lse) of tokens on the rows that `indices` names: the prefill of sparse attention.

    q (seqlen_q, heads_q, head_dim), kv (seqlen_k, 1, head_dim), of which the first `d_v` columns are the
    values. `indices`: int32 (seqlen_q, 1, topk), the rows that each token sees; an entry outside of kv names
    none, as do those from `topk_length` (seqlen_q,) on. `attn_sink`: float32 (heads_q,), a logit that joins
    the denominators of out. `out`: an array of the result's shape and type, to which it is written. Returns
    out (seqlen_q, heads_q, d_v) and two float32 (seqlen_q, heads_q): the
    largest scaled score of each row, -inf where it sees none, and lse, both without the sink. The largest
    scores take a pass of their own over the rows, several times as long as the rest: without
    `return_max_logits` None is returned in their place. With `indexer_topk` the lse over the first so many of
    each token's rows follows, of a pass over these.
    """
    face = face_of(array("q", q))
    _check_axes("q", q, 3, "(seqlen_q, heads_q, head_dim)")
    _check_axes("kv", kv, 3, "(seqlen_k, 1, head_dim)")
    _check_axes("indices", indices, 3, "(seqlen_q, 1, topk)")
    if kv.shape[1] != 1:
        raise UnsupportedError(f"kv has {kv.shape[1]} heads: give one, whose rows all heads share")
    columns = _columns(q, kv, "kv", d_v)
    numbers = _numbers(sm_scale, q, False)
    tokens, rows = _without_gradients(face, q=q, kv=kv)
    of_tokens: Any = indices
    named = ("indices", of_tokens, topk_length)
    made, lse = _on_indices(face, tokens[:, None], rows[:, None], columns, numbers, named)
    made, lse = _finished(face, made, lse, attn_sink, made)
    largest = None
    if flag("return_max_logits", return_max_logits):
        chosen = face.chosen(of_tokens[:, 0], rows.shape[0], topk_length)
        largest = face.largest_scores(tokens, rows[:, 0], *chosen, numbers.scale)
    results = _written(face, made[:, 0], out), largest, lse[..., 0]
    first = count("indexer_topk", indexer_topk, largest=of_tokens.shape[2])
    if not first:
        return results
    named = ("indices", of_tokens[..., :first], topk_length)
    _, of_first = _on_indices(face, tokens[:, None], rows[:, None], columns, numbers, named)
    return (*results, face.without_blind(of_first)[..., 0])


def gather_rows(
    k_cache: Array,
    block_table: Array,
    cu_seqlens_k: Array,
    total_k: int,
    dtype: Any = None,
    *,
    is_fp8_kvcache: bool = False,
    descale_k: Optional[Array] = None,
    seq_starts: Optional[Array] = None,
) -> Any:
    """Rows of sequences from their pages, end to end (total_k, heads_kv, head_dim), as prefill multiplies
    latents out: by chunks, whose parts `merge` joins.

    k_cache, `is_fp8_kvcache` and `descale_k`: as of `flash_mla_with_kvcache`; `block_table`: int32 (batch,
    pages of a sequence). `cu_seqlens_k`: int32 (batch + 1,), from 0, where the rows of each sequence begin in
    the result; those behind the last are 0. `seq_starts`: int32 (batch,), the first row of each sequence that
    is taken, None for 0. `dtype`: that of the rows, needed where the cache is packed. There are no gradients.
    """
    face = face_of(array("k_cache", k_cache))
    _check_axes("k_cache", k_cache, 4, "(pages, page, heads, head_dim)")
    _check_axes("block_table", block_table, 2, "(batch, pages of a sequence)")
    batch, total = block_table.shape[0], count("total_k", total_k)
    if not batch and total:
        raise InputError(f"total_k is {total}: it must be 0 without sequences")
    lengths_of("cu_seqlens_k", cu_seqlens_k, batch + 1, "batch + 1")
    if seq_starts is not None:
        lengths_of("seq_starts", seq_starts, batch, "a first row for each sequence")
    (cache,) = _without_gradients(face, k_cache=k_cache)
    if flag("is_fp8_kvcache", is_fp8_kvcache):
        if dtype is None:
            raise InputError("dtype is None: rows of codes become numbers of a type that it names")
        cache = face.packed_rows("k_cache", cache, dtype, descale_k)
    elif descale_k is not None:
        raise InputError("descale_k without is_fp8_kvcache: it belongs to codes, leave it out")
    elif holds_codes(cache):
        raise InputError(f"k_cache holds {cache.dtype}: rows of codes need is_fp8_kvcache=True")
    ends = face.differences(cu_seqlens_k)
    ends = ends if seq_starts is None else ends + seq_starts
    host = face.host(ends)
    if host is not None:
        room = capacity_of(cache, block_table)
        check_within_cache("the end of a sequence's rows, by cu_seqlens_k and seq_starts,", host, room)
        face.check_table(block_table, host, cache)
    return face.gathered(cache, block_table, cu_seqlens_k, seq_starts, total, dtype)


def _sequences(q, starts, longest, indices):
    """(sequences, an upper bound on the tokens of each) of q, whose tokens are packed where it has `starts`."""
    if starts is None:
        _check_axes("q", q, 4, "(batch, seqlen_q, heads, head_dim)")
        if longest is not None:
            raise InputError("max_seqlen_q without cu_seqlens_q: it belongs to it, leave it out")
        return q.shape[0], q.shape[1]
    _check_axes("q", q, 3, "with cu_seqlens_q (total_q, heads, head_dim)")
    if indices is not None:
        raise InputError(
            "cu_seqlens_q with indices: they name rows for each token, give q as (tokens, 1, heads, head_dim)"
        )
    if longest is None:
        raise InputError("max_seqlen_q is None: with cu_seqlens_q it must be an upper bound")
    _check_axes("cu_seqlens_q", starts, 1, "(batch + 1,)")
    return starts.shape[0] - 1, upper_bound("max_seqlen_q", longest)


def _in_numbers(face, q, is_packed, descale_q, descale_k):
    """q, of codes as numbers."""
    if not is_packed:
        for name, value in (("descale_q", descale_q), ("descale_k", descale_k)):
            if value is not None:
                raise InputError(f"{name} without is_fp8_kvcache: it belongs to codes, leave it out")
        return q
    if holds_codes(q):
        return face.numbers_of(q, descale_q)
    if descale_q is not None:
        raise InputError(f"descale_q beside a q of {q.dtype}: it belongs to one of codes, leave it out")
    return q


def _check_axes(name, value, axes, need):
    if len(array(name, value).shape) != axes:
        raise InputError(f"{name} has the shape {tuple(value.shape)}: it must be {need}")


def _codes_alone(q, cache):
    """The codes of a cache whose rows have nothing else, a byte for each column of q; None for others."""
    held = str(cache.dtype).rpartition(".")[2]
    known = {"float8_e4m3fn": "e4m3", "uint8": "e4m3", "float8_e5m2": "e5m2"}
    return known.get(held) if cache.shape[-1] == q.shape[-1] else None


def _descales(face, cache, descale):
    """The descales of keys and values, which are one number."""
    if descale is None:
        return {}
    one_number("descale_k", str(array("descale_k", descale).dtype), descale.shape, math.prod(descale.shape))
    of_heads = face.expanded(descale.reshape(1), (cache.shape[2],))
    return {"k_descale": of_heads, "v_descale": of_heads}


def _columns(q, cache, name, head_dim_v, codes=None):
    """The columns of a row that are its value."""
    columns = count("head_dim_v", head_dim_v, 1)
    head_dim = q.shape[-1]
    if codes is None and holds_codes(cache):
        raise InputError(f"{name} holds {cache.dtype}: rows of codes need is_fp8_kvcache=True")
    if cache.shape[-1] != head_dim:
        raise InputError(f"{name} has rows of {cache.shape[-1]} columns and q of {head_dim}: as many")
    if columns > head_dim:
        raise InputError(f"head_dim_v is {columns}: it must be at most {head_dim}, the columns of a row")
    return columns


def _numbers(scale, q, causal):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return call_options(scale, causal, (-1, -1), 0.0, False)._replace(latent=True)


def _without_gradients(face, **arrays):
    if not face.has_autograd:
        return tuple(arrays.values())
    return tuple(face.detached(name, value) for name, value in arrays.items())


def _on_pages(face, q, cache, columns, numbers, table, sequences, plans):
    """(out, lse) of tokens on their sequences' pages."""
    most = table.shape[1] * cache.shape[1]
    if _is_unpacked_in_parts(cache, q, table.shape[0] * most):
        host = face.host(sequences.seqused_k)
        if host is not None:
            check_within_cache("cache_seqlens", host, most)
            face.check_table(table, host, cache)
        return _in_parts(face, q, cache, columns, numbers, face.places_of(table, cache), sequences)
    cache = _unpacked(cache)
    extras = sequences._replace(page_table=table)
    return face.attention(q, cache[..., columns:], cache[..., :columns], numbers, extras, plans)


def _on_indices(face, q, cache, columns, numbers, named, descales=None):
    """(out, lse) of each token on the rows of its own: a sequence of one query, with pages of one row.
    `named`: the argument's name, indices and lengths."""
    name, indices, lengths = named
    batch, rows, heads, head_dim = q.shape
    indices = array(name, indices)
    if len(indices.shape) != 3 or tuple(indices.shape[:2]) != (batch, rows):
        raise InputError(f"{name} has the shape {tuple(indices.shape)}: it must be ({batch}, {rows}, topk)")
    if lengths is not None:
        lengths_of("topk_length", lengths, batch)
        lengths = face.repeated(lengths, rows)
    chosen = indices.reshape(batch * rows, indices.shape[2])
    table, used = face.chosen(chosen, cache.shape[0] * cache.shape[1], lengths)
    alone = q.reshape(batch * rows, 1, heads, head_dim)
    sequences = extras_of(seqused_k=used, max_seqlen_q=1, **(descales or {}))
    if _is_unpacked_in_parts(cache, q, table.shape[0] * table.shape[1]):
        out, lse = _in_parts(face, alone, cache, columns, numbers, table, sequences)
    else:
        cache, table = face.rows_of_pages(_unpacked(cache), table)
        extras = sequences._replace(page_table=table)
        out, lse = face.attention(alone, cache[..., columns:], cache[..., :columns], numbers, extras)
    return out.reshape(batch, rows, heads, columns), face.swapped(lse.reshape(batch, rows, heads))


def _is_unpacked_in_parts(cache, q, seen):
    """Whether the rows that sequences see, `seen` in all, are unpacked for each, rather than the cache."""
    rows = cache.shape[0] * cache.shape[1]
    is_small = rows <= seen and rows * q.shape[-1] * q.dtype.itemsize <= ROOM
    return hasattr(cache, "unpacked") and not is_small


def _unpacked(cache):
    return cache.unpacked() if hasattr(cache, "unpacked") else cache


def _in_parts(face, q, cache, columns, numbers, places, sequences):
    """(out, lse) of sequences whose rows are numbered by `places` (batch, most), some sequences at a time, all
    where their tokens are packed: where these begin is not read on the host."""
    batch, most = places.shape
    step = max(1, ROOM // max(1, most * q.shape[-1] * q.dtype.itemsize))
    if sequences.cu_seqlens_q is not None:
        rows = cache.unpacked(places)[:, :, None]
        return face.attention(q, rows[..., columns:], rows[..., :columns], numbers, sequences)
    parts = []
    for part in (slice(at, at + step) for at in range(0, max(1, batch), step)):
        rows = cache.unpacked(places[part])[:, :, None]
        extras = sequences._replace(seqused_k=sequences.seqused_k[part])
        keys = rows[..., columns:], rows[..., :columns]
        parts.append(face.attention(q[part], *keys, numbers, extras))
    return parts[0] if len(parts) == 1 else tuple(map(face.one_after_another, zip(*parts)))


def _finished(face, out, lse, sinks, like):
    """(out, lse) with the sink in the denominators of out, which gets the type of `like`."""
    if sinks is not None:
        need = tuple(out.shape[-2:-1])
        if tuple(array("attn_sink", sinks).shape) != need:
            raise InputError(f"attn_sink has the shape {tuple(sinks.shape)}: it must be {need}, (heads_q,)")
        out = face.sunk(out, lse, sinks, like)
    return out, face.without_blind(lse)


def _written(face, made, out):
    """The result, in the caller's array where there is one."""
    return made if out is None else face.stored(made, check_out(out, made.shape, made.dtype))
