"""Attention for serving models: new queries on a cache of keys and values, work that is planned once for all
layers, and results over parts of the keys that are merged into one. Shapes and options are those of
`fa_attn.interface`."""

from __future__ import annotations

from dataclasses import dataclass, field
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, Dict, Iterable, Literal, Optional, Tuple, Union, overload

from ._checks import (
    array,
    capacity_of,
    check_ascending,
    check_lse,
    check_within_cache,
    count,
    flag,
    int32,
    is_whole,
    lengths_of,
    surely,
    upper_bound,
)
from ._codes import by_factor, coded, encoded, is_per_row, joining
from ._core import InputError, InputTypeError, UnsupportedError
from ._faces import face_of, of_one_library
from ._modifications import Extents, asked
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
    `cache_leftpad`: int32 (batch,), rows before a sequence's first key; cache_seqlens counts them. k and v
    (batch, seqlen_new, heads_kv, head_dim), or packed with `cu_seqlens_k_new`. `rotary_cos`, `rotary_sin`
    (positions, rotary_dim / 2): new keys are rotated by their positions in the cache, queries by theirs
    (without a mask, all queries by cache_seqlens). `rotary_interleaved`: whether neighbouring elements are
    paired, or else halves. `out`: an array of the result's shape and type, to which the result is written.
    `scheduler_metadata`: the result of `get_scheduler_metadata` for these lengths. `qv`: see the module; q
    and k_cache are then of the rotary columns, v_cache of the latents, by which an MLA model decodes. A cache
    of 8 bits (float8_e4m3fn, int8) beside q, k and v of 16: new rows are quantised by `k_descale` and
    `v_descale`, as `quantize_kv` does; descales for each row, in the shape of the cache without its last axis,
    are written with the rows; k and v that are codes join it as they are. Returns out; with
    `return_softmax_lse` (out, lse). There are no gradients.
    """
    if (
        k is v is rotary_cos is rotary_sin is cache_batch_idx is cache_leftpad is alibi_slopes is None
        and cu_seqlens_q is cu_seqlens_k_new is max_seqlen_q is rotary_seqlens is out is None
        and (block_table is None or page_table is None)
        and (return_softmax_lse is True or return_softmax_lse is False)
        and (return_lse is True or return_lse is False)
        and not options
    ):
        wants_lse = return_softmax_lse or return_lse
        made = _step(
            q,
            k_cache,
            v_cache,
            cache_seqlens,
            page_table if block_table is None else block_table,
            call_options(softmax_scale, causal, window_size, softcap, False),
            scheduler_metadata,
            division_of(num_splits, None),
            wants_lse,
        )
        if made is not None:
            return made if wants_lse else made[0]
    tensors, _ = read_options("flash_attn_with_kvcache", options)
    division = division_of(num_splits, options.get("pack_gqa"))
    wants_lse = flag("return_softmax_lse", return_softmax_lse)
    wants_lse = flag("return_lse", return_lse) or wants_lse
    if block_table is not None and page_table is not None:
        raise InputError("block_table and page_table are two names of one table: give one")
    if (k is None) != (v is None):
        raise InputError("k and v are appended together: give both or neither")
    if (rotary_cos is None) != (rotary_sin is None):
        raise InputError("rotary_cos and rotary_sin belong together: give both or neither")
    if rotary_seqlens is not None and rotary_cos is not None and rotary_seqlens is not cache_seqlens:
        raise UnsupportedError("rotary_seqlens: queries and keys are turned by cache_seqlens, leave it out")
    table = block_table if block_table is not None else page_table
    is_paged = table is not None
    face = face_of(q)
    for name, value in (
        ("k", k),
        ("v", v),
        ("rotary_cos", rotary_cos),
        ("rotary_sin", rotary_sin),
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
    if cu_seqlens_q is not None and max_seqlen_q is None:
        raise InputError("max_seqlen_q is None: with cu_seqlens_q it must be an upper bound")
    longest = q.shape[-3]
    if max_seqlen_q is not None:
        bound = upper_bound("max_seqlen_q", max_seqlen_q)
        if surely(bound < 0):
            raise InputError(f"max_seqlen_q is {bound}: it must be at least 0")
        longest = longest if cu_seqlens_q is None else bound
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    numbers = call_options(softmax_scale, causal, window_size, softcap, False, options.get("query_offset"))
    given = q
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
    # What rotary embedding turns: of q in codes their values.
    turned, descales = q, (tensors.get("k_descale"), tensors.get("v_descale"))
    is_fp8 = numbers.out_dtype is not None
    if k is not None and v is not None and numbers.kv_dtype is not None:
        turned, k, v, descales = joining(given, k, v, descales, numbers)
        if is_fp8 and rotary_cos is not None:
            rotary_cos, rotary_sin = face.floats32(rotary_cos), face.floats32(rotary_sin)
    if k is not None and face.has_autograd:
        # What joins a cache of codes is quantised, and of q's type.
        like = k_cache if numbers.kv_dtype is None else turned
        turned, k, v, rotary_cos, rotary_sin = face.cast_to_cache(
            like, turned, k, v, rotary_cos, rotary_sin
        )
        q = q if is_fp8 else turned
    if cache_batch_idx is not None:
        shape = tuple(cache_batch_idx.shape)
        if shape != (batch,):
            raise InputError(
                f"cache_batch_idx has the shape {shape}: it must be ({batch},), a row per sequence"
            )
        table = face.table_of_rows(cache_batch_idx, k_cache.shape[0], table)
    plans = None
    if scheduler_metadata is not None:
        plans = _plans_of(scheduler_metadata)
        chunk = options.get("attention_chunk")
        scheduler_metadata.check(given, k_cache, v_cache, numbers, batch, longest, is_paged, chunk)
        division = scheduler_metadata.divided(division)
    used: Any = cache_seqlens
    if type(used) is int or (not getattr(used, "ndim", 0) and is_whole(used)):
        capacity = capacity_of(k_cache, table)
        if surely(used < 0) or surely(used > capacity):
            raise InputError(
                f"cache_seqlens is {used}: it must be from 0 to {capacity}, the rows of the cache"
            )
        used = face.ints(used, batch, q)
    elif used is not None and (k is not None or cache_leftpad is not None):
        _check_lengths(used, face, batch, capacity_of(k_cache, table))
    if table is not None:
        table = face.contiguous(table)
    if cache_leftpad is not None:
        if table is not None:
            int32("page_table (block_table)", table)
        lengths_of("cache_leftpad", cache_leftpad, batch, "a padding for each sequence")
        if table is None and k_cache.shape[0] != batch:
            raise InputError(
                f"k_cache is of a batch of {k_cache.shape[0]} and q of one of {batch}: give cache_batch_idx"
            )
    # Of the cache without padding, which is left out before keys are counted.
    mods = asked(q, lambda: Extents(batch, q.shape[-2], longest, capacity_of(k_cache, table)), options)
    if k is None or v is None:
        if rotary_cos is not None:
            raise UnsupportedError(
                "rotary embedding turns what is appended: give k and v, or turn q beforehand"
            )
        if cu_seqlens_k_new is not None:
            # Servers give it with every call; nothing is appended.
            lengths_of("cu_seqlens_k_new", cu_seqlens_k_new, batch + 1, "batch + 1")
    else:
        axes = 4 if cu_seqlens_k_new is None else 3
        if len(k.shape) != axes or len(v.shape) != axes:
            _refuse_rows(axes, k=k, v=v)
        if used is None:
            raise InputError("cache_seqlens is missing: k and v are appended behind that many keys")
        if cu_seqlens_k_new is not None:
            _check_starts(cu_seqlens_k_new, k, batch, face)
        # Before the caches are written.
        extras = extras_of(
            cu_seqlens_q=cu_seqlens_q,
            seqused_k=used,
            page_table=table,
            alibi_slopes=alibi_slopes,
            max_seqlen_q=longest,
            **tensors,
        )
        face.check(*_on_values(face, q, k_cache, v_cache, options, numbers), extras, out)
        turned, used = face.append(
            Append(
                k,
                v,
                k_cache,
                v_cache,
                turned,
                rotary_cos,
                rotary_sin,
                interleaved,
                numbers,
                cu_seqlens_k_new,
                k.shape[0],
                used,
                table,
                cu_seqlens_q,
                longest,
                *descales,
            )
        )
        if not is_fp8:
            q = turned
        elif rotary_cos is not None:
            q = face.bits(encoded(turned))
    q, numbers = on_values(face, q, v_cache, options, numbers)
    if (table is not None or cache_leftpad is not None) and used is None:
        used = face.ints(capacity_of(k_cache, table), batch, q)
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
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=starts,
        seqused_k=used,
        page_table=table,
        alibi_slopes=alibi_slopes,
        max_seqlen_q=longest,
        max_seqlen_k=rows,
        **tensors,
    )
    made, lse = face.attention(
        q,
        k_cache,
        v_cache,
        numbers,
        extras,
        plans,
        out=out,
        division=division,
        wants_lse=wants_lse,
        mods=mods,
    )
    if factor is not None:
        made = by_factor(face, made, out, factor)
    return (made, lse) if wants_lse else made


def _without_page(tensors, table):
    """Descales per row as those of a cache without padding lie: packed rows, or pages of one row."""
    for name in ("k_descale", "v_descale"):
        x = tensors.get(name)
        if is_per_row(x):
            pages, page, heads = x.shape
            tensors[name] = x.reshape((pages * page, heads) if table is None else (pages * page, 1, heads))


def _step(q, k_cache, v_cache, used, table, numbers, metadata, division, wants_lse):
    """(out, lse) of queries on a cache and nothing beside, checked by the extension module alone. None where
    it refuses, whose error the long way words, and where arrays are not as it reads them."""
    face = face_of(q)
    extras = face.decoded(q, k_cache, v_cache, used, table)
    if extras is None:
        return None
    plans = None
    if metadata is not None:
        page = None if table is None else k_cache.shape[1]
        if type(metadata) is not SchedulerMetadata or not metadata.is_of(q, k_cache, v_cache, numbers, page):
            return None
        plans, division = metadata.plans, metadata.divided(division)
    try:
        return face.run_forward(
            q, k_cache, v_cache, numbers, extras, plans, division=division, wants_lse=wants_lse
        )
    except (InputError, UnsupportedError):
        return None


def _on_values(face, q, k_cache, v_cache, options, numbers):
    q, numbers = on_values(face, q, v_cache, options, numbers)
    return q, k_cache, v_cache, numbers


def _check_lengths(used, face, batch, capacity):
    """Checks the keys in use of each sequence, on the CPU that the cache holds them."""
    lengths_of("cache_seqlens", used, batch)
    own = face.host(used)
    if own is not None:
        check_within_cache("cache_seqlens", own, capacity)


def _refuse_rows(axes, **rows):
    need = "(batch, seqlen_new" if axes == 4 else "with cu_seqlens_k_new (total"
    name, wrong = next((name, x) for name, x in rows.items() if len(x.shape) != axes)
    raise InputError(f"{name} has the shape {tuple(wrong.shape)}: it must be {need}, heads_kv, head_dim)")


def _check_starts(starts, k, batch, face):
    """Checks the starts of packed new keys."""
    lengths_of("cu_seqlens_k_new", starts, batch + 1, "batch + 1")
    own = face.host(starts)
    if own is not None:
        check_ascending("cu_seqlens_k_new", own, k.shape[0])


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


@dataclass
class SchedulerMetadata:
    """The arguments of `get_scheduler_metadata`, and the work plans that calls have made with it."""

    batch_size: int
    max_seqlen_q: int
    num_heads_q: int
    num_heads_kv: int
    headdim: int
    headdim_v: int
    qkv_dtype: Any
    page_size: Optional[int]
    causal: bool
    window_size: Window
    has_softcap: bool
    division: Any
    attention_chunk: int = 0
    plans: Dict[Tuple[int, int], Any] = field(default_factory=dict, repr=False)

    def is_of(self, q, k_cache, v_cache, numbers, page):
        """Whether the call is the one that was described; outside of torch.compile."""
        batch, longest, heads_q, headdim = q.shape
        return (
            self.batch_size == batch
            and self.max_seqlen_q == longest
            and self.num_heads_q == heads_q
            and self.num_heads_kv == k_cache.shape[-2]
            and self.headdim == headdim
            and self.headdim_v == v_cache.shape[-1]
            and (self.qkv_dtype is None or self.qkv_dtype is q.dtype)
            and (self.page_size is None or self.page_size == page)
            and self.causal is numbers.causal
            and self.window_size == numbers.window
            and self.has_softcap is (numbers.softcap != 0.0)
            and not self.attention_chunk
        )

    def check(self, q, k_cache, v_cache, numbers, batch, longest, is_paged, chunk):
        """Raises an error where the call is not the one that was described."""
        there = {
            "batch_size": batch,
            "max_seqlen_q": longest,
            "num_heads_q": q.shape[-2],
            "num_heads_kv": k_cache.shape[-2],
            "headdim": q.shape[-1],
            "headdim_v": v_cache.shape[-1],
            "qkv_dtype": q.dtype,
            "page_size": k_cache.shape[1] if is_paged else None,
            "causal": numbers.causal,
            "window_size": numbers.window,
            "has_softcap": numbers.softcap != 0.0,
            "attention_chunk": 0 if chunk is None else chunk,
        }
        for name, have in there.items():
            need = getattr(self, name)
            # A type and a page size may be left open.
            if need is not None and _differ(need, have):
                raise InputError(
                    f"scheduler_metadata is of {name} = {need}, the call has {have}: make one for the call"
                )

    def divided(self, division):
        """How the call's work is divided: as the call says, or else the metadata."""
        if None not in (division, self.division) and division != self.division:
            raise InputError(
                f"scheduler_metadata is of (num_splits, pack_gqa) = {self.division}, the call has "
                f"{division}: make one for the call"
            )
        return division or self.division


def _differ(one, other):
    """Whether two values are known to differ: numbers, types or tuples of them."""
    if isinstance(one, tuple):
        return any(map(_differ, one, other))
    return surely(one != other)


def _plans_of(metadata):
    if not isinstance(metadata, SchedulerMetadata):
        kind = type(metadata).__name__
        raise InputTypeError(
            f"scheduler_metadata is {kind}: it must be what fa_attn.get_scheduler_metadata gives"
        )
    return metadata.plans


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Array,
    qkv_dtype: Any = None,
    headdim_v: Optional[int] = None,
    cu_seqlens_q: Optional[Array] = None,
    cu_seqlens_k_new: Optional[Array] = None,
    cache_leftpad: Optional[Array] = None,
    page_size: Optional[int] = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: Optional[int] = 0,
    has_softcap: bool = False,
    num_splits: Optional[int] = 0,
    pack_gqa: Optional[bool] = None,
    sm_margin: Optional[int] = 0,
) -> SchedulerMetadata:
    """The plan of the work on a cache, made once for all layers of a step: give it to
    `flash_attn_with_kvcache` as `scheduler_metadata`.

    Arguments are those of FlashAttention-3. The first call that gets the plan reads the lengths on the device
    and plans; later calls on the same stream skip planning. A plan therefore serves the lengths of one step:
    make another when they change. It is optional: without it each call plans its own work, as do calls that
    are captured in a graph or compiled by torch.compile, and those with `attention_chunk`. Where nothing is
    planned (on the CPU, or for equal lengths) it has no effect. `num_splits` and `pack_gqa` apply to calls
    that do not give their own. A call that contradicts the arguments raises an error.
    """
    read_options("get_scheduler_metadata", {"sm_margin": sm_margin})
    division = division_of(num_splits, pack_gqa)
    lengths = {"cache_seqlens": cache_seqlens, "cu_seqlens_q": cu_seqlens_q}
    lengths.update(cu_seqlens_k_new=cu_seqlens_k_new, cache_leftpad=cache_leftpad)
    for name, value in lengths.items():
        if value is not None or name == "cache_seqlens":
            array(name, value)
    for name, value in (("max_seqlen_k", max_seqlen_k), ("max_seqlen_k_new", max_seqlen_k_new)):
        upper_bound(name, value)
    numbers = call_options(None, causal, window_size, 0.0, False)
    batch = count("batch_size", batch_size)
    lengths_of("cache_seqlens", cache_seqlens, batch, "batch_size")
    headdim = count("headdim", headdim, 1)
    heads_q, heads_kv = count("num_heads_q", num_heads_q, 1), count("num_heads_kv", num_heads_kv, 1)
    if heads_q % heads_kv:
        raise InputError(f"num_heads_q is {heads_q}: it must be a multiple of num_heads_kv, {heads_kv}")
    return SchedulerMetadata(
        batch_size=batch,
        max_seqlen_q=upper_bound("max_seqlen_q", max_seqlen_q),
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        headdim=headdim,
        headdim_v=headdim if headdim_v is None else count("headdim_v", headdim_v, 1),
        qkv_dtype=qkv_dtype,
        page_size=None if page_size is None else count("page_size", page_size, 1),
        causal=numbers.causal,
        window_size=numbers.window,
        has_softcap=flag("has_softcap", has_softcap),
        division=division,
        attention_chunk=0 if attention_chunk is None else count("attention_chunk", attention_chunk),
    )


# The most parts that one launch merges.
_PARTS = 16


def merge(
    outs: Iterable[A],
    lses: Iterable[A],
    sinks: Optional[Array] = None,
    dtype: Any = None,
) -> Tuple[A, A]:
    """Merges results over different keys of the same queries into the result over all of them: parts of a
    long cache, a shared prefix and each sequence's own keys, the steps of ring attention.

    `outs` and `lses`: for each part what the functions return with `return_softmax_lse`, (batch, seqlen_q,
    heads_q, head_dim_v) and (batch, heads_q, seqlen_q), or packed. `sinks`: float32 (heads_q,), which the
    parts leave out. `dtype`: the result's type; None for that of the parts. Computed in float32. Returns
    (out, lse). With torch tensors, outs and lses have gradients.
    """
    outs, lses = _parts("outs", outs), _parts("lses", lses)
    if not outs or len(outs) != len(lses):
        raise InputError(
            f"there are {len(outs)} outs and {len(lses)} lses: give one of each for every part, at least one"
        )
    lses = [check_lse("a part of lses", lse, out) for lse, out in zip(lses, outs)]
    need = tuple(outs[0].shape)
    for index, part in enumerate(outs):
        if tuple(part.shape) != need:
            raise InputError(f"part {index} of outs has the shape {tuple(part.shape)}: the first has {need}")
    if sinks is not None and tuple(array("sinks", sinks).shape) != need[-2:-1]:
        raise InputError(f"sinks has the shape {tuple(sinks.shape)}: it must be {need[-2:-1]}, (heads_q,)")
    face = face_of(outs[0])
    dtype = outs[0].dtype if dtype is None else dtype
    # What is merged again stays in float32, and alone since a call's parts are of one type.
    merged = []
    while len(outs) > _PARTS:
        merged.append(face.merge(outs[:_PARTS], lses[:_PARTS], None, lses[0].dtype))
        outs, lses = outs[_PARTS:], lses[_PARTS:]
    if not merged:
        return face.merge(outs, lses, sinks, dtype)
    merged.append(face.merge(outs, lses, None, lses[0].dtype))
    outs, lses = zip(*merged)
    return merge(outs, lses, sinks, dtype)


def _is_other_type(dtype, given):
    try:
        return bool(dtype != given)
    except (TypeError, ValueError, RuntimeError):
        return True


def _parts(name, parts):
    try:
        # Of a text or a dict the elements are no arrays.
        parts = list(parts)
    except (TypeError, RuntimeError):
        kind = type(parts).__name__
        raise InputTypeError(
            f"{name} is {kind}: it must be a sequence of arrays, one for each part"
        ) from None
    return [array(f"a part of {name}", part) for part in parts]


def flash_attn_combine(
    out_partial: A,
    lse_partial: A,
    out: Optional[A] = None,
    out_dtype: Any = None,
    cu_seqlens: Optional[Array] = None,
    seqused: Optional[Array] = None,
    virtual_batch_idx: Optional[Array] = None,
    return_lse: bool = True,
) -> Tuple[A, Optional[A]]:
    """`merge` by FlashAttention's name and shapes: parts along the first axis.

    `out_partial` (parts, batch, seqlen, heads, head_dim), or (parts, total, heads, head_dim) of packed
    queries; `lse_partial` float32 (parts, batch, seqlen, heads) or (parts, total, heads). `out`: the array to
    write and return; without it a new one, of `out_dtype` or the parts' type. Rows are merged one by one,
    whatever sequences they belong to: `cu_seqlens`, `seqused` and `virtual_batch_idx` have no effect. Returns
    (out, lse), lse in the shape of a part of lse_partial; without `return_lse` (out, None).
    """
    shape = tuple(array("out_partial", out_partial).shape)
    lse_shape = tuple(array("lse_partial", lse_partial).shape)
    if len(shape) not in (4, 5) or shape[0] == 0:
        raise InputError(
            f"out_partial has the shape {shape}: it must be (parts, batch, seqlen, heads, head_dim) or "
            "(parts, total, heads, head_dim), at least one part"
        )
    if lse_shape != shape[:-1]:
        raise InputError(f"lse_partial has the shape {lse_shape}: it must be {shape[:-1]}")
    needless = {"cu_seqlens": cu_seqlens, "seqused": seqused, "virtual_batch_idx": virtual_batch_idx}
    for name, value in needless.items():
        if value is not None:
            array(name, value)
    if out is not None and tuple(array("out", out).shape) != shape[1:]:
        raise InputError(f"out has the shape {tuple(out.shape)}: it must be {shape[1:]}, that of a part")
    if out is not None and out_dtype is not None and _is_other_type(out.dtype, out_dtype):
        raise InputError(f"out_dtype is {short(out_dtype)} and out holds {out.dtype}: give one of them")
    face = face_of(out_partial)
    if out is not None:
        of_one_library("out", out, out_partial, face)
    dtype = out.dtype if out is not None else out_dtype
    lses = [face.swapped(lse) for lse in face.unstack(lse_partial, 0)]
    merged, lse = merge(face.unstack(out_partial, 0), lses, dtype=dtype)
    if out is not None:
        merged = face.stored(merged, out)
    return merged, face.swapped(lse) if flag("return_lse", return_lse) else None
