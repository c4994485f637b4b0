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
- `k_descale`, `v_descale`: what k and v in codes (float8_e4m3fn, float8_e5m2, int8, int4) are multiplied by,
  beside a q of 16 bits (on the CPU also float32). float32 (1,), (heads_kv,) or (batch, heads_kv), broadcast,
  with any strides, or one for each row of each head, in the shape of k without its last axis. None for 1; of
  k and v without codes (1,), (heads_kv,) or (batch, heads_kv), factors like any. `kv_cache_dtype`: 'fp8_e4m3'
  where k and v are uint8 with the bits of e4m3, 'fp8_e5m2' of e5m2, 'int4' where they are uint8 of half as
  many columns with two codes to a byte, the first in the lower half; 'int4_per_token_head' where vLLM wrote
  them and the scales of rows, which are the descales: they are unpacked to int8 by each call, the whole of a
  cache in pages. Gradients raise an error where they are asked for. `quantize_kv` makes all but the last.
- `q_descale`: what a q of float8_e4m3fn beside such k and v is multiplied by, per K/V head: (1,), (heads_kv,)
  or (batch, heads_kv). The result is bfloat16 as FlashAttention-3's, of numpy's uint8 float32. On a GPU, of
  compute capability 9.0; torch's tensors on any, where what a kernel of 8 bits does not compute (programs,
  descales for each row, pages of one key) is computed with q in bfloat16, which has all of its numbers.
- `output_scale`: float32 (1,). The result is then float8_e4m3fn (of numpy's arrays uint8 with its bits): what
  would be in 16 bits, divided by it. Without gradients.
- `qv` (also `q_v`): q's rows of v's columns. Keys are then v followed by k, as in multi-head latent
  attention (MLA): scores are q k^T + qv v^T, and `softmax_scale` is by default 1 / sqrt(head_dim +
  head_dim_v), FlashAttention-3's; a model has that of its heads before absorption. Without gradients. v may
  have any columns, on a GPU, of compute capability 9.0, 512.
- arguments that are accepted at their neutral value only: `sm_margin` 0; `scheduler_metadata`
  (but of `flash_attn_varlen_func` and `flash_attn_with_kvcache`), `score_mod_bwd`,
  `block_sparse_tensors_bwd`, `aux_tensors`, `aux_tensor_leading_dims`, `aux_scalars`, `dynamic_causal`,
  `gather_kv_indices`, `gather_kv_valid_length`, `seqlen_k_per_split` and `num_heads_q` None. Any other value
  raises an error.
- `cp_world_size`, `cp_rank`, `cp_tot_seqused_k`, of `flash_attn_varlen_func` and `flash_attn_with_kvcache`:
  the keys are those whose place in the whole modulo `cp_world_size` is `cp_rank`, as vLLM deals caches to
  ranks; `cp_tot_seqused_k`, int32 (batch,), are keys of the whole, to which a causal mask is aligned. Results
  of ranks are joined by their LSE (`merge`). Without windows.
- arguments that are accepted and not needed: `min_seqlen_k`, `disable_scheduler_metadata`, `fa_version`,
  `ver`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Optional, Tuple, overload

from ._calls import attention_of, face_of_stacked, gradients_of, of_stacked
from ._faces import face_of
from ._merging import flash_attn_combine, merge
from ._options import Options, call_options, extras_of, read_options, with_options
from ._schedules import get_scheduler_metadata
from ._types import A, Array, Window
from .packed import (
    flash_attn_varlen_backward,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
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
    read = read_options("flash_attn_func", options)
    numbers = call_options(
        softmax_scale, causal, window_size, softcap, deterministic, options.get("query_offset")
    )
    returns = (return_softmax_lse, return_lse, return_attn_probs)
    beside = dict(alibi_slopes=alibi_slopes)
    return attention_of(face, (q, k, v), numbers, read, beside, dropout_p, out, returns, options)


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
    return of_stacked(
        "flash_attn_qkvpacked_func",
        flash_attn_func,
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
    k, v = face_of_stacked("kv", kv, 5, 2, 2).unstack(kv, 2)
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
    return gradients_of(dout, q, k, v, out, softmax_lse, numbers, extras, dlse)
