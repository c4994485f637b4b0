"""FlashAttention's functions: its names, the order of its arguments, its defaults and results.

Shapes: `q` (batch, seqlen_q, heads_q, head_dim), `k` (batch, seqlen_k, heads_kv, head_dim), `v` (batch,
seqlen_k, heads_kv, head_dim_v), `out` (batch, seqlen_q, heads_q, head_dim_v); packed arrays are (total,
heads, head_dim). heads_kv divides heads_q. Masks are aligned to the bottom right: with d = i + seqlen_k -
seqlen_q query i sees the keys j with d - left <= j <= d + right. LSE is a natural logarithm in float32,
(batch, heads_q, seqlen_q) or (heads_q, total_q), and includes the sink; a row that sees no key has out = 0
and LSE = -inf (or the sink).

In addition to FlashAttention-2's arguments, every function takes these of its successors by name:

- `sinks` (also `learnable_sink`, `s_aux`): float32 (heads_q,), a logit that joins each row's denominator.
- `query_offset`: with it d = i + seqlen_k - seqlen_q + query_offset, for masks and ALiBi.
- `return_softmax_lse` (also `return_lse`): (out, lse) instead of out.
- `num_splits`: parts of the keys of a tile of queries, each computed by a CTA of its own; 1 for undivided
  keys, 0 or None for the planner's choice, 256 at most. There are no more parts than steps; where lengths are
  read on the GPU, it is the most parts of a tile. `pack_gqa`: whether the query heads of a K/V head share a
  tile, None for the planner's choice. Both concern the forward on a GPU, where they decide which kernel
  computes it; on the CPU the cores divide the work. Results are equal except for the order of sums.
- `bias`: floating point, added to the scaled scores; `mask`: True where a query sees a key, or added as a
  bias. Both are broadcast to (batch, heads_q, seqlen_q, seqlen_k), of packed sequences to the bounds on
  lengths. `score_mod` (score, b, h, q_idx, kv_idx) and `mask_mod` (b, h, q_idx, kv_idx): a function as
  torch's flex_attention takes, a program's text or a `Program`; their indices are raw, and a mask is
  intersected with `causal` and `window_size`. `attention_chunk`: a query sees its chunk of so many keys, 0
  for all. `block_sparse_tensors`: FlashAttention 4's lists of blocks, with their block_size; `mask_mod` says
  what is seen in those that are partial. With torch tensors, biases and arrays that a function reads have
  gradients (docs/programs.md).
- `rng_state`: (seed, offset) of dropout, whose bits are then FlashAttention-2's: two integers, or with torch
  an int64 tensor of both. Without it `dropout_p` takes torch's generator; numpy and jax have to give it, jax
  also a key of jax.random. The LSE is that without dropout (docs/programs.md).
- `k_descale`, `v_descale`: what k and v in codes (float8_e4m3fn, int8, int4) are multiplied by, beside a q
  of 16 bits (on the CPU also float32). float32 (1,), (heads_kv,) or (batch, heads_kv), broadcast, with any
  strides, or one for each row of each head, in the shape of k without its last axis. None for 1; of k and v
  without codes (1,), (heads_kv,) or (batch, heads_kv), factors like any. `kv_cache_dtype`: 'fp8_e4m3' where k
  and v are uint8 with the bits of e4m3, 'int4' where they are uint8 of half as many columns with two codes to
  a byte, the first in the lower half. Gradients raise an error where they are asked for.
  `quantize_kv` makes both.
- `q_descale`: what a q of float8_e4m3fn beside such k and v is multiplied by, per K/V head: (1,), (heads_kv,)
  or (batch, heads_kv). The result is bfloat16 as FlashAttention-3's, of numpy's uint8 float32. On a GPU, of
  compute capability 9.0, without a soft cap and descales for each row.
- `output_scale`: float32 (1,). The result is then float8_e4m3fn (of numpy's arrays uint8 with its bits): what
  would be in 16 bits, divided by it. Without gradients.
- `qv` (also `q_v`): q's rows of v's columns. Keys are then v followed by k, as in multi-head latent
  attention (MLA): scores are q k^T + qv v^T, and `softmax_scale` is by default 1 / sqrt(head_dim +
  head_dim_v), FlashAttention-3's; a model has that of its heads before absorption. Without gradients. v may
  have any columns, on a GPU, of compute capability 9.0, 512.
- arguments that are accepted at their neutral value only: `sm_margin` 0; `scheduler_metadata`
  (but of `flash_attn_varlen_func` and `flash_attn_with_kvcache`), `score_mod_bwd`,
  `block_sparse_tensors_bwd`, `aux_tensors`, `aux_tensor_leading_dims`, `aux_scalars`, `dynamic_causal`,
  `gather_kv_indices`, `gather_kv_valid_length`, `seqlen_k_per_split`, `num_heads_q` and `cp_tot_seqused_k`
  None; `cp_world_size` 1, `cp_rank` 0. Any other value raises an error.
- arguments that are accepted and not needed: `min_seqlen_k`, `disable_scheduler_metadata`, `fa_version`,
  `ver`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Optional, Tuple, overload

from ._checks import array, check_backward, check_lse, upper_bound
from ._codes import as_codes, by_factor, coded, holds_codes, no_codes
from ._core import InputError
from ._dropout import dropping
from ._faces import face_of
from ._merging import flash_attn_combine, merge
from ._modifications import asked, extents_of
from ._options import (
    DividedOptions,
    Options,
    call_options,
    extras_of,
    on_values,
    read_options,
    returned,
    with_options,
)
from ._schedules import SchedulerMetadata, get_scheduler_metadata, plans_of
from ._types import A, Array, Window
from .serving import flash_attn_with_kvcache

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "flash_attn_backward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_backward",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "merge",
]


def _asked(q, extents, options, dropout_p):
    """What the keywords of a call and its dropout make of its scores and probabilities."""
    mods = asked(q, extents, options)
    if type(dropout_p) is float and dropout_p == 0.0 and not options:
        return mods
    return dropping(mods, q, extents, dropout_p, options.get("rng_state"))


# fmt: off
@overload
def flash_attn_func(
    q: A, k: A, v: A, dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Optional[Array] = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False, *, out: Optional[Array] = None,
    return_softmax_lse: Literal[False] = False, return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> A: ...
@overload
def flash_attn_func(
    q: A, k: A, v: A, dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Optional[Array] = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False, *, out: Optional[Array] = None,
    return_softmax_lse: Literal[True], return_lse: bool = False, **options: Unpack[Options],
) -> Tuple[A, A]: ...
@overload
def flash_attn_func(
    q: A, k: A, v: A, dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Optional[Array] = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, out: Optional[Array] = None,
    return_softmax_lse: bool = False, return_lse: bool = False, **options: Unpack[Options],
) -> Any: ...
# fmt: on
@with_options
def flash_attn_func(
    q: A,
    k: A,
    v: A,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Array] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    out: Optional[Array] = None,
    return_softmax_lse: bool = False,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """softmax(mask(softmax_scale * q k^T)) v for each query head of each sequence.

    q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_kv, head_dim). `softmax_scale`:
    None for 1 / sqrt(head_dim). `dropout_p`: the share of probabilities that are dropped. `window_size`:
    (left, right) keys around the diagonal, -1 for no limit.
    `softcap`: cap * tanh(score / cap), 0 for none. `alibi_slopes`: float32 (heads_q,) or (batch, heads_q).
    `deterministic`: gradients have the same bits in every run. `out`: an array of the result's shape and
    type, to which the result is written, without gradients. Returns out, in the shape of q; with
    `return_attn_probs` (out, softmax_lse, None), with `return_softmax_lse` (also `return_lse`) (out,
    softmax_lse). The options of every function (`sinks`, `num_splits`, ..): see the module.
    """
    face = face_of(q)
    made = face.plain_attention(
        q,
        k,
        v,
        (softmax_scale, causal, window_size, softcap, deterministic),
        (out, return_softmax_lse, return_lse, return_attn_probs),
        alibi_slopes,
        (),
        options,
        dropout_p,
    )
    if made is not None:
        return made
    tensors, division = read_options("flash_attn_func", options)
    numbers = call_options(
        softmax_scale, causal, window_size, softcap, deterministic, options.get("query_offset")
    )
    given, output_scale = (q, k, v), options.get("output_scale")
    room = out if output_scale is None else None
    q, k, v, tensors, numbers, factor = coded(
        q, k, v, tensors, numbers, options.get("kv_cache_dtype"), out=room
    )
    if alibi_slopes is None and not tensors:
        extras = None
    else:
        extras = extras_of(alibi_slopes=alibi_slopes, **tensors)
    q, numbers = on_values(face, q, v, options, numbers)
    wants_lse = not (return_softmax_lse is return_lse is return_attn_probs is False)
    mods = _asked(q, lambda: extents_of(q, k, extras), options, dropout_p)
    made, lse = face.attention(
        q, k, v, numbers, extras, out=room, division=division, wants_lse=wants_lse, mods=mods
    )
    if numbers.kv_dtype is not None:
        made, lse = face.refused((made, lse), *given)
    if factor is not None:
        made = by_factor(face, made, room, factor)
    if output_scale is not None:
        made = as_codes(face, made, out, output_scale)
    return returned(made, lse, return_softmax_lse, return_lse, return_attn_probs)


# fmt: off
@overload
def flash_attn_qkvpacked_func(
    qkv: A, dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Optional[Array] = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False, *,
    return_softmax_lse: Literal[False] = False, return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> A: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: A, dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Optional[Array] = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False, *,
    return_softmax_lse: Literal[True], return_lse: bool = False, **options: Unpack[Options],
) -> Tuple[A, A]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: A, dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Optional[Array] = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, return_softmax_lse: bool = False,
    return_lse: bool = False, **options: Unpack[Options],
) -> Any: ...
# fmt: on
@with_options
def flash_attn_qkvpacked_func(
    qkv: A,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Array] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """`flash_attn_func` of q, k and v in one array, qkv (batch, seqlen, 3, heads, head_dim), read where it
    lies."""
    return _of_stacked(
        "flash_attn_qkvpacked_func",
        qkv,
        None,
        dropout_p,
        dict(
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            deterministic=deterministic,
        ),
        alibi_slopes,
        (return_softmax_lse, return_lse, return_attn_probs),
        options,
    )


# fmt: off
@overload
def flash_attn_kvpacked_func(
    q: A, kv: A, dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Optional[Array] = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False, *, out: Optional[Array] = None,
    return_softmax_lse: Literal[False] = False, return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> A: ...
@overload
def flash_attn_kvpacked_func(
    q: A, kv: A, dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Optional[Array] = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False, *, out: Optional[Array] = None,
    return_softmax_lse: Literal[True], return_lse: bool = False, **options: Unpack[Options],
) -> Tuple[A, A]: ...
@overload
def flash_attn_kvpacked_func(
    q: A, kv: A, dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Optional[Array] = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, out: Optional[Array] = None,
    return_softmax_lse: bool = False, return_lse: bool = False, **options: Unpack[Options],
) -> Any: ...
# fmt: on
@with_options
def flash_attn_kvpacked_func(
    q: A,
    kv: A,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Array] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    out: Optional[Array] = None,
    return_softmax_lse: bool = False,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """`flash_attn_func` of k and v in one array, kv (batch, seqlen, 2, heads_kv, head_dim), read where it
    lies."""
    k, v = _face_of_stacked("kv", kv, 5, 2, 2).unstack(kv, 2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        out=out,
        return_softmax_lse=return_softmax_lse,
        return_lse=return_lse,
        **options,
    )


def _face_of_stacked(name, stacked, axes, axis, count):
    shape = tuple(array(name, stacked).shape)
    if len(shape) != axes or shape[axis] != count:
        need = "(total, " if axes == 4 else "(batch, seqlen, "
        raise InputError(f"{name} has the shape {shape}: it must be {need}{count}, heads, head_dim)")
    return face_of(stacked)


def _of_stacked(function, qkv, packed, dropout_p, numbers, alibi_slopes, returns, options):
    """What a function gives of q, k and v in one array, whose gradient is one array, too. `packed`: the
    starts of sequences and their upper bound, None of a padded batch; `numbers`: the arguments of
    `call_options`."""
    axis = 2 if packed is None else 1
    face = _face_of_stacked("qkv", qkv, axis + 3, axis, 3)
    lengths = None
    if packed is not None:
        starts, longest = packed
        lengths = (starts, starts, None, None, None, None, longest, longest, None)
    made = face.plain_packed_attention(
        qkv,
        axis,
        tuple(numbers.values()),
        (None, *returns),
        alibi_slopes,
        (),
        options,
        dropout_p,
        lengths,
    )
    if made is not None:
        return made
    tensors, division = read_options(function, options)
    wants_softmax_lse, wants_lse, wants_probs = returns
    if holds_codes(qkv) or options.get("output_scale") is not None:
        lengths = () if packed is None else (packed[0], packed[0], packed[1], packed[1])
        return (flash_attn_func if packed is None else flash_attn_varlen_func)(
            *face.unstack(qkv, axis),
            *lengths,
            dropout_p=dropout_p,
            alibi_slopes=alibi_slopes,
            return_attn_probs=wants_probs,
            return_softmax_lse=wants_softmax_lse,
            return_lse=wants_lse,
            **numbers,
            **options,
        )
    no_codes("qkv", options)
    if packed is not None:
        starts, longest = packed
        if longest is None:
            raise InputError("max_seqlen is None: with cu_seqlens it must be an upper bound")
        longest = upper_bound("max_seqlen", longest)
        tensors = dict(
            tensors,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
        )
    extras = extras_of(alibi_slopes=alibi_slopes, **tensors)

    def extents():
        q = qkv[:, :, 0] if packed is None else qkv[:, 0]
        return extents_of(q, q, extras)

    out, lse = face.packed_attention(
        qkv,
        axis,
        call_options(**numbers, query_offset=options.get("query_offset")),
        extras,
        division=division,
        wants_lse=not (wants_softmax_lse is wants_lse is wants_probs is False),
        mods=_asked(qkv, extents, options, dropout_p),
    )
    return returned(out, lse, *returns)


# fmt: off
@overload
def flash_attn_varlen_func(
    q: A, k: A, v: A, cu_seqlens_q: Optional[Array] = None, cu_seqlens_k: Optional[Array] = None,
    max_seqlen_q: Optional[int] = None, max_seqlen_k: Optional[int] = None, dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Optional[Array] = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, block_table: Optional[Array] = None, *,
    seqused_q: Optional[Array] = None, seqused_k: Optional[Array] = None,
    page_table: Optional[Array] = None, out: Optional[Array] = None,
    return_softmax_lse: Literal[False] = False, return_lse: Literal[False] = False,
    scheduler_metadata: Optional[SchedulerMetadata] = None, **options: Unpack[DividedOptions],
) -> A: ...
@overload
def flash_attn_varlen_func(
    q: A, k: A, v: A, cu_seqlens_q: Optional[Array] = None, cu_seqlens_k: Optional[Array] = None,
    max_seqlen_q: Optional[int] = None, max_seqlen_k: Optional[int] = None, dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Optional[Array] = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, block_table: Optional[Array] = None, *,
    seqused_q: Optional[Array] = None, seqused_k: Optional[Array] = None,
    page_table: Optional[Array] = None, out: Optional[Array] = None, return_softmax_lse: Literal[True],
    return_lse: bool = False,
    scheduler_metadata: Optional[SchedulerMetadata] = None, **options: Unpack[DividedOptions],
) -> Tuple[A, A]: ...
@overload
def flash_attn_varlen_func(
    q: A, k: A, v: A, cu_seqlens_q: Optional[Array] = None, cu_seqlens_k: Optional[Array] = None,
    max_seqlen_q: Optional[int] = None, max_seqlen_k: Optional[int] = None, dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Optional[Array] = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Optional[Array] = None, *,
    seqused_q: Optional[Array] = None, seqused_k: Optional[Array] = None,
    page_table: Optional[Array] = None, out: Optional[Array] = None, return_softmax_lse: bool = False,
    return_lse: bool = False,
    scheduler_metadata: Optional[SchedulerMetadata] = None, **options: Unpack[DividedOptions],
) -> Any: ...
# fmt: on
@with_options
def flash_attn_varlen_func(
    q: A,
    k: A,
    v: A,
    cu_seqlens_q: Optional[Array] = None,
    cu_seqlens_k: Optional[Array] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Array] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Optional[Array] = None,
    *,
    seqused_q: Optional[Array] = None,
    seqused_k: Optional[Array] = None,
    page_table: Optional[Array] = None,
    out: Optional[Array] = None,
    return_softmax_lse: bool = False,
    return_lse: bool = False,
    scheduler_metadata: Optional[SchedulerMetadata] = None,
    **options: Unpack[DividedOptions],
) -> Any:
    """`flash_attn_func` of sequences that are packed end to end.

    q (total_q, heads_q, head_dim), k and v (total_k, heads_kv, head_dim). `cu_seqlens_q`, `cu_seqlens_k`:
    int32 (batch + 1,), the first row of each sequence, then the end of the last; None where the side is
    padded, (batch, seqlen, heads, head_dim). `max_seqlen_q`, `max_seqlen_k`: upper bounds on the rows in use
    of a packed sequence. With `block_table` (also `page_table`), int32 (batch, pages of a sequence), k and v
    are (pages, page, heads_kv, head_dim), any page size, and have no gradients; their lengths come from
    cu_seqlens_k or seqused_k. `seqused_q`, `seqused_k`: int32 (batch,), rows in use of each sequence. `out`:
    see `flash_attn_func`. `scheduler_metadata`: the result of `get_scheduler_metadata` for these lengths.
    Returns out (total_q, heads_q, head_dim_v); LSE is (heads_q, total_q). With torch tensors on a GPU, and
    where `out` is given, rows of out that belong to no sequence are not written.
    """
    face = face_of(q)
    made = face.plain_attention(
        q,
        k,
        v,
        (softmax_scale, causal, window_size, softcap, deterministic),
        (out, return_softmax_lse, return_lse, return_attn_probs),
        alibi_slopes,
        (),
        options,
        dropout_p,
        (
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_k,
            block_table,
            page_table,
            None,
            max_seqlen_q,
            max_seqlen_k,
            seqused_q,
        ),
        metadata=scheduler_metadata,
    )
    if made is not None:
        return made
    tensors, division = read_options("flash_attn_varlen_func", options)
    if block_table is not None and page_table is not None:
        raise InputError("block_table and page_table are two names of one table: give one")
    table = block_table if block_table is not None else page_table
    if table is not None:
        if seqused_k is None:
            if cu_seqlens_k is None:
                raise InputError("keys in pages need their lengths: give cu_seqlens_k or seqused_k")
            seqused_k = face.differences(array("cu_seqlens_k", cu_seqlens_k))
        cu_seqlens_k = None
    for name, starts, longest in (("q", cu_seqlens_q, max_seqlen_q), ("k", cu_seqlens_k, max_seqlen_k)):
        if starts is not None and longest is None:
            raise InputError(f"max_seqlen_{name} is None: with cu_seqlens_{name} it must be an upper bound")
    numbers = call_options(
        softmax_scale, causal, window_size, softcap, deterministic, options.get("query_offset")
    )
    given, output_scale = (q, k, v), options.get("output_scale")
    room = out if output_scale is None else None
    plans = None
    if scheduler_metadata is not None:
        plans = plans_of(scheduler_metadata)
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        longest = q.shape[1] if cu_seqlens_q is None else max_seqlen_q
        chunk = options.get("attention_chunk")
        scheduler_metadata.check(q, k, v, numbers, batch, longest, table is not None, chunk)
        division = scheduler_metadata.divided(division)
    q, k, v, tensors, numbers, factor = coded(
        q, k, v, tensors, numbers, options.get("kv_cache_dtype"), cu_seqlens_q, out=room
    )
    extras = extras_of(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        page_table=table,
        alibi_slopes=alibi_slopes,
        max_seqlen_q=0 if max_seqlen_q is None else max_seqlen_q,
        max_seqlen_k=0 if max_seqlen_k is None else max_seqlen_k,
        **tensors,
    )
    q, numbers = on_values(face, q, v, options, numbers)
    wants_lse = not (return_softmax_lse is return_lse is return_attn_probs is False)
    mods = _asked(q, lambda: extents_of(q, k, extras), options, dropout_p)
    made, lse = face.attention(
        q, k, v, numbers, extras, plans, out=room, division=division, wants_lse=wants_lse, mods=mods
    )
    if numbers.kv_dtype is not None:
        made, lse = face.refused((made, lse), *given)
    if factor is not None:
        made = by_factor(face, made, room, factor)
    if output_scale is not None:
        made = as_codes(face, made, out, output_scale)
    return returned(made, lse, return_softmax_lse, return_lse, return_attn_probs)


# fmt: off
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: A, cu_seqlens: Array, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Optional[Array] = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, return_softmax_lse: Literal[False] = False,
    return_lse: Literal[False] = False, **options: Unpack[Options],
) -> A: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: A, cu_seqlens: Array, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Optional[Array] = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, return_softmax_lse: Literal[True],
    return_lse: bool = False, **options: Unpack[Options],
) -> Tuple[A, A]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: A, cu_seqlens: Array, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Optional[Array] = None, deterministic: bool = False,
    return_attn_probs: bool = False, *, return_softmax_lse: bool = False, return_lse: bool = False,
    **options: Unpack[Options],
) -> Any: ...
# fmt: on
@with_options
def flash_attn_varlen_qkvpacked_func(
    qkv: A,
    cu_seqlens: Array,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Array] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """`flash_attn_varlen_func` of q, k and v in one array, qkv (total, 3, heads, head_dim)."""
    return _of_stacked(
        "flash_attn_varlen_qkvpacked_func",
        qkv,
        (cu_seqlens, max_seqlen),
        dropout_p,
        dict(
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            deterministic=deterministic,
        ),
        alibi_slopes,
        (return_softmax_lse, return_lse, return_attn_probs),
        options,
    )


# fmt: off
@overload
def flash_attn_varlen_kvpacked_func(
    q: A, kv: A, cu_seqlens_q: Optional[Array], cu_seqlens_k: Optional[Array], max_seqlen_q: Optional[int],
    max_seqlen_k: Optional[int], dropout_p: float = 0.0, softmax_scale: Optional[float] = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Optional[Array] = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, seqused_q: Optional[Array] = None,
    seqused_k: Optional[Array] = None, out: Optional[Array] = None,
    return_softmax_lse: Literal[False] = False, return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> A: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: A, kv: A, cu_seqlens_q: Optional[Array], cu_seqlens_k: Optional[Array], max_seqlen_q: Optional[int],
    max_seqlen_k: Optional[int], dropout_p: float = 0.0, softmax_scale: Optional[float] = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Optional[Array] = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, seqused_q: Optional[Array] = None,
    seqused_k: Optional[Array] = None, out: Optional[Array] = None, return_softmax_lse: Literal[True],
    return_lse: bool = False, **options: Unpack[Options],
) -> Tuple[A, A]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: A, kv: A, cu_seqlens_q: Optional[Array], cu_seqlens_k: Optional[Array], max_seqlen_q: Optional[int],
    max_seqlen_k: Optional[int], dropout_p: float = 0.0, softmax_scale: Optional[float] = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Optional[Array] = None, deterministic: bool = False, return_attn_probs: bool = False, *,
    seqused_q: Optional[Array] = None, seqused_k: Optional[Array] = None, out: Optional[Array] = None,
    return_softmax_lse: bool = False, return_lse: bool = False, **options: Unpack[Options],
) -> Any: ...
# fmt: on
@with_options
def flash_attn_varlen_kvpacked_func(
    q: A,
    kv: A,
    cu_seqlens_q: Optional[Array],
    cu_seqlens_k: Optional[Array],
    max_seqlen_q: Optional[int],
    max_seqlen_k: Optional[int],
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Array] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seqused_q: Optional[Array] = None,
    seqused_k: Optional[Array] = None,
    out: Optional[Array] = None,
    return_softmax_lse: bool = False,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """`flash_attn_varlen_func` of k and v in one array, kv (total_k, 2, heads_kv, head_dim)."""
    k, v = _face_of_stacked("kv", kv, 4, 1, 2).unstack(kv, 1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        out=out,
        return_softmax_lse=return_softmax_lse,
        return_lse=return_lse,
        **options,
    )


def flash_attn_backward(
    dout: A,
    q: A,
    k: A,
    v: A,
    out: A,
    softmax_lse: A,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Array] = None,
    deterministic: bool = False,
    sinks: Optional[Array] = None,
    dlse: Optional[Array] = None,
    query_offset: Optional[int] = 0,
) -> Tuple[A, ...]:
    """The gradients of `flash_attn_func`, for arrays without autograd. `out` and `softmax_lse` are its
    results, `dout` is the gradient of out, `dlse` that of softmax_lse, float32 in its shape. Returns (dq, dk,
    dv), with sinks (dq, dk, dv, dsinks)."""
    extras = extras_of(alibi_slopes=alibi_slopes, sinks=sinks)
    numbers = call_options(softmax_scale, causal, window_size, softcap, deterministic, query_offset)
    return _gradients(dout, q, k, v, out, softmax_lse, numbers, extras, dlse)


def flash_attn_varlen_backward(
    dout: A,
    q: A,
    k: A,
    v: A,
    out: A,
    softmax_lse: A,
    cu_seqlens_q: Optional[Array],
    cu_seqlens_k: Optional[Array],
    max_seqlen_q: Optional[int],
    max_seqlen_k: Optional[int],
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Array] = None,
    deterministic: bool = False,
    seqused_q: Optional[Array] = None,
    seqused_k: Optional[Array] = None,
    sinks: Optional[Array] = None,
    dlse: Optional[Array] = None,
    query_offset: Optional[int] = 0,
) -> Tuple[A, ...]:
    """The gradients of `flash_attn_varlen_func`: see `flash_attn_backward`. Rows that belong to no sequence
    get 0."""
    extras = extras_of(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    numbers = call_options(softmax_scale, causal, window_size, softcap, deterministic, query_offset)
    return _gradients(dout, q, k, v, out, softmax_lse, numbers, extras, dlse)


def _gradients(dout, q, k, v, out, lse, numbers, extras, dlse):
    check_backward(dout, q, k, v, out, lse)
    if dlse is not None:
        check_lse("dlse", dlse, q)
    dq, dk, dv, dsinks = face_of(q).backward(dout, q, k, v, out, lse, numbers, extras, dlse)
    return (dq, dk, dv) if dsinks is None else (dq, dk, dv, dsinks)
