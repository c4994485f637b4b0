"""FlashAttention's functions of sequences that are packed end to end. Shapes and options are those of
`fa_attn.interface`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Optional, Tuple, overload

from ._calls import attention_of, face_of_stacked, gradients_of, of_stacked
from ._checks import array
from ._core import InputError
from ._faces import face_of
from ._modifications import of_rank
from ._options import DividedOptions, Options, call_options, extras_of, read_options, with_options
from ._schedules import SchedulerMetadata, plans_of
from ._types import A, Array, Window

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
    are (pages, page, heads_kv, head_dim), any page size; their lengths come from cu_seqlens_k or seqused_k.
    Torch's have gradients, q's too, from copies of the keys of all columns of the table. `seqused_q`,
    `seqused_k`: int32 (batch,), rows in use of each sequence. `out`: see `flash_attn_func`.
    `scheduler_metadata`: the result of `get_scheduler_metadata` for these lengths.
    Returns out (total_q, heads_q, head_dim_v); LSE is (heads_q, total_q). With torch tensors on a GPU, and
    where `out` is given, rows of out that belong to no sequence are not written.
    """
    if options and options.get("cp_world_size") not in (None, 1):
        causal, options = of_rank(causal, window_size, options)
        # A plan of causal work is not of this mask's.
        window_size, scheduler_metadata = (-1, -1), None
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
    plans = None
    if scheduler_metadata is not None:
        plans = plans_of(scheduler_metadata)
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        longest = q.shape[1] if cu_seqlens_q is None else max_seqlen_q
        chunk = options.get("attention_chunk")
        scheduler_metadata.check(q, k, v, numbers, batch, longest, table is not None, chunk)
        division = scheduler_metadata.divided(division)
    beside = dict(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        page_table=table,
        alibi_slopes=alibi_slopes,
        max_seqlen_q=0 if max_seqlen_q is None else max_seqlen_q,
        max_seqlen_k=0 if max_seqlen_k is None else max_seqlen_k,
    )
    returns, read = (return_softmax_lse, return_lse, return_attn_probs), (tensors, division)
    return attention_of(face, (q, k, v), numbers, read, beside, dropout_p, out, returns, options, plans)


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
    return of_stacked(
        "flash_attn_varlen_qkvpacked_func",
        flash_attn_varlen_func,
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
    k, v = face_of_stacked("kv", kv, 4, 1, 2).unstack(kv, 1)
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
    return gradients_of(dout, q, k, v, out, softmax_lse, numbers, extras, dlse)
