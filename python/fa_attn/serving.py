"""Attention for serving models: new queries on a cache of keys and values. Shapes and options are those of
`fa_attn.interface`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Optional, Tuple, Union, overload

from ._checks import (
    array,
    capacity_of,
    check_ascending,
    check_within_cache,
    flag,
    int32,
    is_whole,
    lengths_of,
    surely,
    upper_bound,
)
from ._codes import as_codes, by_factor, coded, encoded, is_per_row, joining
from ._core import InputError, UnsupportedError
from ._faces import face_of, of_one_library
from ._modifications import Extents, asked, of_rank
from ._options import (
    CallOptions,
    CommonOptions,
    call_options,
    division_of,
    extras_of,
    on_values,
    read_options,
    with_options,
)
from ._schedules import SchedulerMetadata, plans_of
from ._types import A, Array, Window

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class Append:
    """What is appended to a cache, and how keys and queries are rotated."""

    k: Any
    v: Any
    k_cache: Any
    v_cache: Any
    q: Any
    cos: Any
    sin: Any
    interleaved: bool
    # Under a mask queries follow each other, without one they share a position.
    options: CallOptions
    cu_new: Any
    max_new: int
    used_k: Any
    page_table: Any
    cu_q: Any
    max_q: int
    # Of a cache of codes: written where they are per row.
    k_descale: Any
    v_descale: Any


# fmt: off
@overload
def flash_attn_with_kvcache(
    q: A, k_cache: Array, v_cache: Array, k: Optional[Array] = None, v: Optional[Array] = None,
    rotary_cos: Optional[Array] = None, rotary_sin: Optional[Array] = None,
    cache_seqlens: Union[int, Array, None] = None, cache_batch_idx: Optional[Array] = None,
    cache_leftpad: Optional[Array] = None, block_table: Optional[Array] = None,
    softmax_scale: Optional[float] = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Optional[Array] = None,
    num_splits: Optional[int] = 0, return_softmax_lse: Literal[False] = False, *,
    page_table: Optional[Array] = None, cu_seqlens_q: Optional[Array] = None,
    cu_seqlens_k_new: Optional[Array] = None, max_seqlen_q: Optional[int] = None,
    rotary_seqlens: Optional[Array] = None, out: Optional[Array] = None,
    return_lse: Literal[False] = False,
    scheduler_metadata: Optional[SchedulerMetadata] = None, **options: Unpack[CommonOptions],
) -> A: ...
@overload
def flash_attn_with_kvcache(
    q: A, k_cache: Array, v_cache: Array, k: Optional[Array] = None, v: Optional[Array] = None,
    rotary_cos: Optional[Array] = None, rotary_sin: Optional[Array] = None,
    cache_seqlens: Union[int, Array, None] = None, cache_batch_idx: Optional[Array] = None,
    cache_leftpad: Optional[Array] = None, block_table: Optional[Array] = None,
    softmax_scale: Optional[float] = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Optional[Array] = None,
    num_splits: Optional[int] = 0, *, page_table: Optional[Array] = None,
    cu_seqlens_q: Optional[Array] = None, cu_seqlens_k_new: Optional[Array] = None,
    max_seqlen_q: Optional[int] = None, rotary_seqlens: Optional[Array] = None,
    out: Optional[Array] = None, return_lse: bool = False, return_softmax_lse: Literal[True],
    scheduler_metadata: Optional[SchedulerMetadata] = None, **options: Unpack[CommonOptions],
) -> Tuple[A, A]: ...
@overload
def flash_attn_with_kvcache(
    q: A, k_cache: Array, v_cache: Array, k: Optional[Array] = None, v: Optional[Array] = None,
    rotary_cos: Optional[Array] = None, rotary_sin: Optional[Array] = None,
    cache_seqlens: Union[int, Array, None] = None, cache_batch_idx: Optional[Array] = None,
    cache_leftpad: Optional[Array] = None, block_table: Optional[Array] = None,
    softmax_scale: Optional[float] = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Optional[Array] = None,
    num_splits: Optional[int] = 0, return_softmax_lse: bool = False, *, page_table: Optional[Array] = None,
    cu_seqlens_q: Optional[Array] = None, cu_seqlens_k_new: Optional[Array] = None,
    max_seqlen_q: Optional[int] = None, rotary_seqlens: Optional[Array] = None,
    out: Optional[Array] = None, return_lse: bool = False,
    scheduler_metadata: Optional[SchedulerMetadata] = None, **options: Unpack[CommonOptions],
) -> Any: ...
# fmt: on
@with_options
def flash_attn_with_kvcache(
    q: A,
    k_cache: Array,
    v_cache: Array,
    k: Optional[Array] = None,
    v: Optional[Array] = None,
    rotary_cos: Optional[Array] = None,
    rotary_sin: Optional[Array] = None,
    cache_seqlens: Union[int, Array, None] = None,
    cache_batch_idx: Optional[Array] = None,
    cache_leftpad: Optional[Array] = None,
    block_table: Optional[Array] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Optional[Array] = None,
    num_splits: Optional[int] = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Optional[Array] = None,
    cu_seqlens_q: Optional[Array] = None,
    cu_seqlens_k_new: Optional[Array] = None,
    max_seqlen_q: Optional[int] = None,
    rotary_seqlens: Optional[Array] = None,
    out: Optional[Array] = None,
    return_lse: bool = False,
    scheduler_metadata: Optional[SchedulerMetadata] = None,
    **options: Unpack[CommonOptions],
) -> Any:
    """Attention of new queries on a cache of keys and values, to which `k` and `v` are appended in place
    first.

    q (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with `cu_seqlens_q` and
    `max_seqlen_q`. k_cache and v_cache (batch_cache, room, heads_kv, head_dim), or (pages, page, heads_kv,
    head_dim) with `block_table` (also `page_table`), int32 (batch, pages of a sequence), any page size.
    `cache_seqlens`: an int or int32 (batch,), keys in the cache before the call; None for all of it.
    `cache_batch_idx`: int32 (batch,), the row of the cache, or of the table, of each sequence.
    `cache_leftpad`: int32 (batch,), rows before a sequence's first key; cache_seqlens counts them, and new
    rows that lie there are written too (FlashAttention-2 leaves them out, FlashAttention-3 whole blocks of
    them), which no query sees. k and v (batch, seqlen_new, heads_kv, head_dim), or packed with
    `cu_seqlens_k_new`. `rotary_cos`, `rotary_sin`
    (positions, rotary_dim / 2): new keys are rotated by their positions in the cache, queries by theirs
    (without a mask, all queries by cache_seqlens). `rotary_interleaved`: whether neighbouring elements are
    paired, or else halves. `out`: an array of the result's shape and type, to which the result is written.
    `scheduler_metadata`: the result of `get_scheduler_metadata` for these lengths. `qv`: see the module; q
    and k_cache are then of the rotary columns, v_cache of the latents, by which an MLA model decodes. A cache
    of codes (float8_e4m3fn, float8_e5m2, int8, int4) beside q, k and v of 16: new rows are quantised by
    `k_descale` and `v_descale`, as `quantize_kv` does; descales for each row, in the shape of the cache
    without its last axis, are written with the rows; k and v that are codes join it as they are. Returns out;
    with `return_softmax_lse` (out, lse). There are no gradients.
    """
    if options and options.get("cp_world_size") not in (None, 1):
        causal, options = of_rank(causal, window_size, options)
        # A plan of causal work is not of this mask's.
        window_size, scheduler_metadata = (-1, -1), None
    face = face_of(q)
    mask = (softmax_scale, causal, window_size, softcap, False)
    results = (out, return_softmax_lse, return_lse, False)
    made = face.plain_attention(
        q,
        k_cache,
        v_cache,
        mask,
        results,
        alibi_slopes,
        (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, rotary_seqlens),
        options,
        0.0,
        (cu_seqlens_q, None, cache_seqlens, block_table, page_table, cu_seqlens_k_new, max_seqlen_q, None, None),
        num_splits,
        True,
        scheduler_metadata,
    )
    if made is not None:
        return made
    tensors, _ = read_options("flash_attn_with_kvcache", options)
    division = division_of(num_splits, options.get("pack_gqa"))
    wants_lse = flag("return_softmax_lse", return_softmax_lse)
    wants_lse = flag("return_lse", return_lse) or wants_lse
    if block_table is not None and page_table is not None:
        raise InputError("block_table and page_table are two names of one table: give one")
    new = _New(k, v, rotary_cos, rotary_sin, cu_seqlens_k_new)
    _check_partners(new)
    if rotary_seqlens is not None and rotary_cos is not None and rotary_seqlens is not cache_seqlens:
        raise UnsupportedError("rotary_seqlens: queries and keys are turned by cache_seqlens, leave it out")
    table = block_table if block_table is not None else page_table
    for name, value in (
        *zip(("k", "v", "rotary_cos", "rotary_sin"), new),
        ("cache_batch_idx", cache_batch_idx),
        ("cache_leftpad", cache_leftpad),
        ("page_table (block_table)", table),
        ("cu_seqlens_q", cu_seqlens_q),
    ):
        if value is not None:
            array(name, value)
    _check_shapes(q, k_cache, v_cache, table, cu_seqlens_q)
    # Caches that are read may be of another library, but for torch's, which are detached.
    caches = () if k is None and not face.has_autograd else (("k_cache", k_cache), ("v_cache", v_cache))
    for name, value in (*caches, ("out", out)):
        if value is not None:
            of_one_library(name, value, q, face)
    interleaved = flag("rotary_interleaved", rotary_interleaved)
    longest = _longest(q, cu_seqlens_q, max_seqlen_q)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    numbers = call_options(softmax_scale, causal, window_size, softcap, False, options.get("query_offset"))
    given, is_paged = q, table is not None
    q, k_cache, v_cache, tensors, numbers, factor = coded(
        q,
        k_cache,
        v_cache,
        tensors,
        numbers,
        options.get("kv_cache_dtype"),
        cu_seqlens_q,
        names=("k_cache", "v_cache"),
        is_cache=True,
        appends=k is not None,
    )
    if numbers.out_dtype is None:
        # Times its descale, and of codes of e5m2 their values.
        given = q
    output_scale = options.get("output_scale")
    room = out if output_scale is None else None
    q, turned, new, descales = _joined(face, given, q, new, k_cache, tensors, numbers)
    if cache_batch_idx is not None:
        table = _table_of_rows(face, cache_batch_idx, k_cache, table, batch)
    elif table is None and k_cache.shape[0] != batch:
        raise InputError(
            f"k_cache is of a batch of {k_cache.shape[0]} and q of one of {batch}: give cache_batch_idx, or "
            "block_table where the cache is in pages"
        )
    plans = None
    if scheduler_metadata is not None:
        plans = plans_of(scheduler_metadata)
        chunk = options.get("attention_chunk")
        scheduler_metadata.check(given, k_cache, v_cache, numbers, batch, longest, is_paged, chunk)
        division = scheduler_metadata.divided(division)
    capacity = capacity_of(k_cache, table)
    is_checked = k is not None or cache_leftpad is not None
    used = _used(face, cache_seqlens, q, batch, capacity, is_checked)
    if table is not None:
        table = face.contiguous(table)
    if cache_leftpad is not None:
        _check_padding(cache_leftpad, table, batch)
    # Of the cache without padding, which is left out before keys are counted.
    mods = asked(q, lambda: Extents(batch, q.shape[-2], longest, capacity), options)
    queries = dict(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=longest, alibi_slopes=alibi_slopes)
    if k is None:
        _check_no_rows(new, batch)
    else:
        _check_rows(face, new, used, batch)
        # Before the caches are written.
        extras = extras_of(**queries, seqused_k=used, page_table=table, **tensors)
        face.check(*_on_values(face, q, k_cache, v_cache, options, numbers), extras, room)
        turned, used = face.append(
            Append(
                new.k,
                new.v,
                k_cache,
                v_cache,
                turned,
                new.cos,
                new.sin,
                interleaved,
                numbers,
                new.starts,
                new.k.shape[0],
                used,
                table,
                cu_seqlens_q,
                longest,
                *descales,
            )
        )
        if numbers.out_dtype is None:
            q = turned
        elif new.cos is not None:
            q = face.bits(encoded(turned))
        is_moved = cache_batch_idx is not None or cache_leftpad is not None
        if not is_moved and numbers.kv_dtype is None and scheduler_metadata is None:
            made = face.plain_attention_on_cache(
                q,
                k_cache,
                v_cache,
                mask,
                results,
                alibi_slopes,
                (),
                options,
                0.0,
                (cu_seqlens_q, None, used, table, None, None, max_seqlen_q, None, None),
                num_splits,
                True,
            )
            if made is not None:
                return made
    q, numbers = on_values(face, q, v_cache, options, numbers)
    if (table is not None or cache_leftpad is not None) and used is None:
        used = face.ints(capacity, batch, q)
    starts, rows = None, 0
    if cache_leftpad is not None:
        _without_page(tensors, table)
        k_cache, v_cache, starts, used, table = face.without_padding(
            k_cache, v_cache, cache_leftpad, used, table
        )
        rows = 0 if starts is None else k_cache.shape[0]
    if face.has_autograd:
        # What is written in place has no gradients, so the gradients of the other arrays would be incomplete.
        q, k_cache = face.detached("q", q), face.detached("k_cache", k_cache)
        v_cache = face.detached("v_cache", v_cache)
        tensors = {name: face.detached(name, value) for name, value in tensors.items()}
        if mods is not None:
            mods = mods.with_arrays(face.detached(*named) for named in zip(mods.names, mods.arrays))
    extras = extras_of(
        **queries, cu_seqlens_k=starts, seqused_k=used, page_table=table, max_seqlen_k=rows, **tensors
    )
    made, lse = face.attention(
        q,
        k_cache,
        v_cache,
        numbers,
        extras,
        plans,
        out=room,
        division=division,
        wants_lse=wants_lse,
        mods=mods,
    )
    if factor is not None:
        made = by_factor(face, made, room, factor)
    if output_scale is not None:
        made = as_codes(face, made, out, output_scale)
    return (made, lse) if wants_lse else made


class _New(NamedTuple):
    """Rows that a call appends, and the tables by which they are turned."""

    k: Any
    v: Any
    cos: Any
    sin: Any
    # Of packed rows.
    starts: Any


def _joined(face, given, q, new, k_cache, tensors, numbers):
    """q, what rotary embedding turns of it, the new rows as their cache takes them, and its descales."""
    # Of q in codes their values.
    turned, descales = q, (tensors.get("k_descale"), tensors.get("v_descale"))
    if new.k is None:
        return q, turned, new, descales
    k, v, cos, sin, starts = new
    is_fp8 = numbers.out_dtype is not None
    if numbers.kv_dtype is not None:
        turned, k, v, descales = joining(given, k, v, descales, numbers)
        if is_fp8 and cos is not None:
            cos, sin = face.floats32(cos), face.floats32(sin)
    if face.has_autograd:
        # What joins a cache of codes is quantised, and of q's type.
        like = k_cache if numbers.kv_dtype is None else turned
        turned, k, v, cos, sin = face.cast_to_cache(like, turned, k, v, cos, sin)
        q = q if is_fp8 else turned
    return q, turned, _New(k, v, cos, sin, starts), descales


def _check_partners(new):
    if (new.k is None) != (new.v is None):
        raise InputError("k and v are appended together: give both or neither")
    if (new.cos is None) != (new.sin is None):
        raise InputError("rotary_cos and rotary_sin belong together: give both or neither")


def _longest(q, cu_seqlens_q, max_seqlen_q):
    """The most queries of a sequence."""
    if max_seqlen_q is None:
        if cu_seqlens_q is not None:
            raise InputError("max_seqlen_q is None: with cu_seqlens_q it must be an upper bound")
        return q.shape[-3]
    bound = upper_bound("max_seqlen_q", max_seqlen_q)
    if surely(bound < 0):
        raise InputError(f"max_seqlen_q is {bound}: it must be at least 0")
    return q.shape[-3] if cu_seqlens_q is None else bound


def _table_of_rows(face, rows, k_cache, table, batch):
    """The table of a call's sequences, which name their rows of the cache or of its table."""
    shape = tuple(rows.shape)
    if shape != (batch,):
        raise InputError(f"cache_batch_idx has the shape {shape}: it must be ({batch},), a row per sequence")
    return face.table_of_rows(rows, k_cache.shape[0], table)


def _used(face, cache_seqlens, q, batch, capacity, is_checked):
    """The keys in use of each sequence, as an array; None for all."""
    used = cache_seqlens
    if type(used) is int or (not getattr(used, "ndim", 0) and is_whole(used)):
        if surely(used < 0) or surely(used > capacity):
            raise InputError(
                f"cache_seqlens is {used}: it must be from 0 to {capacity}, the rows of the cache"
            )
        return face.ints(used, batch, q)
    if used is not None and is_checked:
        lengths_of("cache_seqlens", used, batch)
        # On the CPU those that the cache holds.
        own = face.host(used)
        if own is not None:
            check_within_cache("cache_seqlens", own, capacity)
    return used


def _check_padding(padding, table, batch):
    if table is not None:
        int32("page_table (block_table)", table)
    lengths_of("cache_leftpad", padding, batch, "a padding for each sequence")


def _check_no_rows(new, batch):
    if new.cos is not None:
        raise UnsupportedError("rotary embedding turns what is appended: give k and v, or turn q beforehand")
    if new.starts is not None:
        # Servers give it with every call; nothing is appended.
        lengths_of("cu_seqlens_k_new", new.starts, batch + 1, "batch + 1")


def _check_rows(face, new, used, batch):
    axes = 4 if new.starts is None else 3
    for name, rows in (("k", new.k), ("v", new.v)):
        if len(rows.shape) != axes:
            need = "(batch, seqlen_new" if axes == 4 else "with cu_seqlens_k_new (total"
            shape = tuple(rows.shape)
            raise InputError(f"{name} has the shape {shape}: it must be {need}, heads_kv, head_dim)")
    if used is None:
        raise InputError("cache_seqlens is missing: k and v are appended behind that many keys")
    if new.starts is not None:
        lengths_of("cu_seqlens_k_new", new.starts, batch + 1, "batch + 1")
        own = face.host(new.starts)
        if own is not None:
            check_ascending("cu_seqlens_k_new", own, new.k.shape[0])


def _without_page(tensors, table):
    """Descales per row as those of a cache without padding lie: packed rows, or pages of one row."""
    for name in ("k_descale", "v_descale"):
        x = tensors.get(name)
        if is_per_row(x):
            pages, page, heads = x.shape
            tensors[name] = x.reshape((pages * page, heads) if table is None else (pages * page, 1, heads))


def _on_values(face, q, k_cache, v_cache, options, numbers):
    q, numbers = on_values(face, q, v_cache, options, numbers)
    return q, k_cache, v_cache, numbers


def _check_shapes(q, k_cache, v_cache, table, cu_seqlens_q):
    """Checks the axes of a call's arrays."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if len(array(name, cache).shape) != 4:
            raise InputError(
                f"{name} has the shape {tuple(cache.shape)}: it must be (batch, room, heads_kv, head_dim) or "
                "(pages, page, heads_kv, head_dim)"
            )
    if tuple(k_cache.shape[:3]) != tuple(v_cache.shape[:3]):
        shapes = f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        raise InputError(f"k_cache and v_cache have the shapes {shapes}: only their last axes may differ")
    if cu_seqlens_q is not None and len(cu_seqlens_q.shape) != 1:
        raise InputError(f"cu_seqlens_q has the shape {tuple(cu_seqlens_q.shape)}: it must be (batch + 1,)")
    if len(array("q", q).shape) != (4 if cu_seqlens_q is None else 3):
        need = "(batch, seqlen_q" if cu_seqlens_q is None else "with cu_seqlens_q (total_q"
        raise InputError(f"q has the shape {tuple(q.shape)}: it must be {need}, heads_q, head_dim)")
    if table is not None and len(table.shape) != 2:
        shape = tuple(table.shape)
        raise InputError(
            f"page_table (block_table) has the shape {shape}: it must be (batch, pages of a sequence)"
        )
