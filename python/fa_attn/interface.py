"""FlashAttention's functions: its names, the order of its arguments, its defaults and results.

Shapes: `q` (batch, seqlen_q, heads_q, head_dim), `k` (batch, seqlen_k, heads_kv, head_dim), `v` (batch,
seqlen_k, heads_kv, head_dim_v), `out` (batch, seqlen_q, heads_q, head_dim_v); packed arrays are (total,
heads, head_dim). heads_kv divides heads_q. Masks are aligned to the bottom right: with d = i + seqlen_k -
seqlen_q query i sees the keys j with d - left <= j <= d + right. LSE is a natural logarithm in float32,
(batch, heads_q, seqlen_q) or (heads_q, total_q), and includes the sink; a row that sees no key has out = 0
and LSE = -inf (or the sink).

Beside FlashAttention-2's arguments every function takes these of its successors by name:

- `sinks` (also `learnable_sink`, `s_aux`): float32 (heads_q,), a logit that joins each row's denominator.
- `return_softmax_lse` (also `return_lse`): (out, lse) instead of out.
- what is a hint or not computed at its neutral value: `num_splits` 0 or 1, `pack_gqa` None, `sm_margin` 0,
  `attention_chunk` 0; `qv`, `q_descale`, `k_descale`, `v_descale`, `scheduler_metadata`,
  `score_mod`, `mask_mod`, `block_sparse_tensors`, `aux_tensors`, `aux_scalars`, `gather_kv_indices`,
  `seqlen_k_per_split`, `num_heads_q` None. Anything else raises.
- what nothing here needs: `min_seqlen_k`, `disable_scheduler_metadata`.
"""

from dataclasses import dataclass
from numbers import Integral
from reprlib import repr as short
from typing import Any

from ._checks import LARGEST, array, flag, is_neutral, masses, most, no_dropout, number, window
from ._core import BESIDE, InputError, UnsupportedError
from ._faces import face_of

# Names of FlashAttention's that are taken at these values, and what would work otherwise.
_NEUTRAL = {
    "num_splits": ((0, 1, None), "how often keys are divided is the planner's choice, leave it at 0"),
    "pack_gqa": ((None,), "whether heads share a tile is the planner's choice, leave it at None"),
    "sm_margin": ((0, None), "kernels use all SMs, leave it at 0"),
    "attention_chunk": ((0, None), "use window_size, or pack each chunk as a sequence of its own"),
    "qv": ((None,), "a second query on the values is not computed: join q and qv along the head dim"),
    "q_descale": ((None,), "no kernel computes in fp8: convert to bfloat16"),
    "k_descale": ((None,), "no kernel computes in fp8: convert to bfloat16"),
    "v_descale": ((None,), "no kernel computes in fp8: convert to bfloat16"),
    "scheduler_metadata": ((None,), "work is planned on the device, leave it out"),
    "score_mod": ((None,), "scores are changed by softcap, alibi_slopes and sinks alone"),
    "mask_mod": ((None,), "masks are causal ones and windows"),
    "block_sparse_tensors": ((None,), "masks are causal ones and windows"),
    "aux_tensors": ((None,), "scores are changed by softcap, alibi_slopes and sinks alone"),
    "score_mod_bwd": ((None,), "scores are changed by softcap, alibi_slopes and sinks alone"),
    "aux_scalars": ((None,), "scores are changed by softcap, alibi_slopes and sinks alone"),
    "block_sparse_tensors_bwd": ((None,), "masks are causal ones and windows"),
    "gather_kv_indices": ((None,), "keys are read in order: gather them, or give pages of one row"),
    "seqlen_k_per_split": ((None,), "how keys are divided is the planner's choice, leave it out"),
    "num_heads_q": ((None,), "qkv has as many heads for each: give q, k and v to flash_attn_func"),
}

# Promises and wishes about FlashAttention's scheduler, which nothing here needs.
_NEEDLESS = {"min_seqlen_k": most, "disable_scheduler_metadata": flag}

_SINKS = ("sinks", "learnable_sink", "s_aux")
_LSE = ("return_softmax_lse", "return_lse")


def _others(function, others):
    """(sinks, whether LSE is wanted) of the arguments by name; refuses what is not computed."""
    sinks, wants_lse = None, False
    for name, value in others.items():
        if name in _SINKS:
            if value is not None and sinks is not None:
                raise InputError("sinks are given twice: by one of the names sinks, learnable_sink and s_aux")
            sinks = value if value is not None else sinks
        elif name in _LSE:
            wants_lse = wants_lse or flag(name, value)
        elif name in _NEUTRAL:
            neutral, advice = _NEUTRAL[name]
            if not is_neutral(value, neutral):
                raise UnsupportedError(f"{name} = {short(value)}: {advice}")
        elif name in _NEEDLESS:
            if value is not None:
                _NEEDLESS[name](name, value)
        else:
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")
    return sinks, wants_lse


def _extras(cu_q, cu_k, used_q, used_k, table, slopes, sinks, max_q=0, max_k=0):
    if cu_q is cu_k is used_q is used_k is table is slopes is sinks is None:
        return None
    for name, value in zip(BESIDE, (cu_q, cu_k, used_q, used_k, table, slopes, sinks)):
        if value is not None:
            array(name, value)
    bounds = most("max_seqlen_q", max_q), most("max_seqlen_k", max_k)
    return (cu_q, cu_k, used_q, used_k, table, slopes, sinks, *bounds)


def _options(softmax_scale, causal, window_size, softcap, deterministic):
    """The options of a call, checked."""
    return (
        number("softmax_scale", softmax_scale),
        flag("causal", causal),
        window(window_size),
        number("softcap", softcap) or 0.0,
        flag("deterministic", deterministic),
    )


def _returned(out, lse, wants_lse, return_attn_probs):
    if return_attn_probs:
        return out, lse, None
    return (out, lse) if wants_lse else out


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    **others,
):
    """softmax(mask(softmax_scale * q k^T)) v for each query head of each sequence.

    q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_kv, head_dim). `softmax_scale`: 1
    / sqrt(head_dim) where None. `window_size`: (left, right) keys around the diagonal, -1 for no limit.
    `softcap`: cap * tanh(score / cap), 0 for none. `alibi_slopes`: float32 (heads_q,) or (batch, heads_q).
    `deterministic`: gradients with the same bits in every run. Returns out, in the shape of q; with
    `return_attn_probs` (out, softmax_lse, None). `others`: see the module.
    """
    no_dropout(dropout_p)
    sinks, wants_lse = _others("flash_attn_func", others) if others else (None, False)
    if alibi_slopes is None and sinks is None:
        extras = None
    else:
        extras = _extras(None, None, None, None, None, alibi_slopes, sinks)
    options = _options(softmax_scale, causal, window_size, softcap, deterministic)
    out, lse = face_of(q).attention(q, k, v, *options, extras)
    if return_attn_probs or wants_lse:
        return _returned(out, lse, wants_lse, return_attn_probs)
    return out


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    **others,
):
    """`flash_attn_func` of q, k and v in one array, qkv (batch, seqlen, 3, heads, head_dim), read where it
    lies."""
    no_dropout(dropout_p)
    sinks, wants_lse = _others("flash_attn_qkvpacked_func", others)
    face = _face_of_stacked("qkv", qkv, 5, 2, 3)
    extras = _extras(None, None, None, None, None, alibi_slopes, sinks)
    options = _options(softmax_scale, causal, window_size, softcap, deterministic)
    out, lse = face.packed_attention(qkv, 2, *options, extras)
    return _returned(out, lse, wants_lse, return_attn_probs)


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    **others,
):
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
        **others,
    )


def _face_of_stacked(name, stacked, axes, axis, count):
    shape = tuple(array(name, stacked).shape)
    if len(shape) != axes or shape[axis] != count:
        need = "(total, " if axes == 4 else "(batch, seqlen, "
        raise InputError(f"{name} has the shape {shape}: it must be {need}{count}, heads, head_dim)")
    return face_of(stacked)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    *,
    seqused_q=None,
    seqused_k=None,
    page_table=None,
    **others,
):
    """`flash_attn_func` of sequences that are packed end to end.

    q (total_q, heads_q, head_dim), k and v (total_k, heads_kv, head_dim). `cu_seqlens_q`, `cu_seqlens_k`:
    int32 (batch + 1,), the first row of each sequence, then the end of the last; None where the side is
    padded, (batch, seqlen, heads, head_dim). `max_seqlen_q`, `max_seqlen_k`: upper bounds on the rows of a
    packed sequence. With `block_table` (also `page_table`), int32
    (batch, pages of a sequence), k and v are (pages, page, heads_kv, head_dim), any page size, and have no
    gradients; their lengths come from cu_seqlens_k or seqused_k. `seqused_q`, `seqused_k`: int32 (batch,),
    rows in use of each sequence. Returns out (total_q, heads_q, head_dim_v); LSE is (heads_q, total_q). Of a
    torch tensor on a GPU rows of out that no sequence has are not written.
    """
    no_dropout(dropout_p)
    sinks, wants_lse = _others("flash_attn_varlen_func", others) if others else (None, False)
    if block_table is not None and page_table is not None:
        raise InputError("block_table and page_table are two names of one table: give one")
    table = block_table if block_table is not None else page_table
    face = face_of(q)
    if table is not None:
        if seqused_k is None:
            if cu_seqlens_k is None:
                raise InputError("keys in pages need their lengths: give cu_seqlens_k or seqused_k")
            seqused_k = face.differences(array("cu_seqlens_k", cu_seqlens_k))
        cu_seqlens_k = None
    for name, starts, most in (("q", cu_seqlens_q, max_seqlen_q), ("k", cu_seqlens_k, max_seqlen_k)):
        if starts is not None and most is None:
            raise InputError(f"max_seqlen_{name} is None: with cu_seqlens_{name} it must be an upper bound")
    extras = _extras(
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        table,
        alibi_slopes,
        sinks,
        0 if max_seqlen_q is None else max_seqlen_q,
        0 if max_seqlen_k is None else max_seqlen_k,
    )
    options = _options(softmax_scale, causal, window_size, softcap, deterministic)
    out, lse = face.attention(q, k, v, *options, extras)
    return _returned(out, lse, wants_lse, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    **others,
):
    """`flash_attn_varlen_func` of q, k and v in one array, qkv (total, 3, heads, head_dim)."""
    no_dropout(dropout_p)
    sinks, wants_lse = _others("flash_attn_varlen_qkvpacked_func", others)
    face = _face_of_stacked("qkv", qkv, 4, 1, 3)
    if max_seqlen is None:
        raise InputError("max_seqlen is None: with cu_seqlens it must be an upper bound")
    max_seqlen = most("max_seqlen", max_seqlen)
    extras = _extras(cu_seqlens, cu_seqlens, None, None, None, alibi_slopes, sinks, max_seqlen, max_seqlen)
    options = _options(softmax_scale, causal, window_size, softcap, deterministic)
    out, lse = face.packed_attention(qkv, 1, *options, extras)
    return _returned(out, lse, wants_lse, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    **others,
):
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
        **others,
    )


@dataclass
class Append:
    """What is appended to a cache, and how keys and queries are turned."""

    k: Any
    v: Any
    k_cache: Any
    v_cache: Any
    q: Any
    cos: Any
    sin: Any
    interleaved: bool
    following: bool
    cu_new: Any
    max_new: int
    used_k: Any
    page_table: Any
    cu_q: Any
    max_q: int


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
    *,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    **others,
):
    """Attention of new queries on a cache of keys and values, to which `k` and `v` are appended in place
    first.

    q (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with `cu_seqlens_q` and
    `max_seqlen_q`. k_cache and v_cache (batch_cache, room, heads_kv, head_dim), or (pages, page, heads_kv,
    head_dim) with `block_table` (also `page_table`), int32 (batch, pages of a sequence), any page size.
    `cache_seqlens`: an int or int32 (batch,), keys in the cache before the call; None for all of it.
    `cache_batch_idx`: int32 (batch,), the row of the cache, or of the table, of each sequence.
    `cache_leftpad`: int32 (batch,), rows before a sequence's first key; cache_seqlens counts them. k and v
    (batch, seqlen_new, heads_kv, head_dim), or packed with `cu_seqlens_k_new`. `rotary_cos`, `rotary_sin`
    (positions, rotary_dim / 2): new keys are turned by their position in the cache, queries by theirs (all by
    cache_seqlens without a mask); pairs are neighbours, or halves where not `rotary_interleaved`. Returns
    out; with `return_softmax_lse` (out, lse). There are no gradients. The kernel chooses how often keys are
    divided: `num_splits` is 0 or 1.
    """
    sinks, wants_lse = _others("flash_attn_with_kvcache", {**others, "num_splits": num_splits})
    wants_lse = flag("return_softmax_lse", return_softmax_lse) or wants_lse
    if block_table is not None and page_table is not None:
        raise InputError("block_table and page_table are two names of one table: give one")
    if (k is None) != (v is None):
        raise InputError("k and v are appended together: give both or neither")
    if (rotary_cos is None) != (rotary_sin is None):
        raise InputError("rotary_cos and rotary_sin belong together: give both or neither")
    if rotary_seqlens is not None and rotary_cos is not None and rotary_seqlens is not cache_seqlens:
        raise UnsupportedError("rotary_seqlens: queries and keys are turned by cache_seqlens, leave it out")
    table = block_table if block_table is not None else page_table
    face = face_of(q)
    for name, value in (
        ("k", k),
        ("v", v),
        ("cache_batch_idx", cache_batch_idx),
        ("cache_leftpad", cache_leftpad),
        ("page_table (block_table)", table),
        ("cu_seqlens_q", cu_seqlens_q),
    ):
        if value is not None:
            array(name, value)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if len(array(name, cache).shape) != 4:
            raise InputError(
                f"{name} has the shape {tuple(cache.shape)}: it must be (batch, room, heads_kv, head_dim) or "
                "(pages, page, heads_kv, head_dim)"
            )
    if len(array("q", q).shape) != (4 if cu_seqlens_q is None else 3):
        need = "(batch, seqlen_q" if cu_seqlens_q is None else "with cu_seqlens_q (total_q"
        raise InputError(f"q has the shape {tuple(q.shape)}: it must be {need}, heads_q, head_dim)")
    if table is not None and len(table.shape) != 2:
        shape = tuple(table.shape)
        raise InputError(
            f"page_table (block_table) has the shape {shape}: it must be (batch, pages of a sequence)"
        )
    if cu_seqlens_q is not None and max_seqlen_q is None:
        raise InputError("max_seqlen_q is None: with cu_seqlens_q it must be an upper bound")
    longest = 0 if max_seqlen_q is None else most("max_seqlen_q", max_seqlen_q)
    if cache_batch_idx is not None:
        # Without pages a row of the cache is a page of its own.
        rows = face.as_column(cache_batch_idx)
        table = rows if table is None else face.select(table, cache_batch_idx)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    options = _options(softmax_scale, causal, window_size, softcap, False)
    used = cache_seqlens
    if isinstance(used, Integral):
        if not 0 <= used <= LARGEST:
            raise InputError(f"cache_seqlens is {used}: it must be from 0 to {LARGEST}")
        used = face.ints(int(used), batch, q)
    if k is None:
        if rotary_cos is not None:
            raise UnsupportedError(
                "rotary embedding turns what is appended: give k and v, or turn q beforehand"
            )
        if cu_seqlens_k_new is not None:
            raise InputError("cu_seqlens_k_new without k and v: leave it out")
    else:
        if used is None:
            raise InputError("cache_seqlens is missing: k and v are appended behind that many keys")
        q, used = face.append(
            Append(
                k,
                v,
                k_cache,
                v_cache,
                q,
                rotary_cos,
                rotary_sin,
                flag("rotary_interleaved", rotary_interleaved),
                options[1] or options[2] != (-1, -1),
                cu_seqlens_k_new,
                k.shape[0],
                used,
                table,
                cu_seqlens_q,
                longest or q.shape[0],
            )
        )
    if (table is not None or cache_leftpad is not None) and used is None:
        room = k_cache.shape[1] * (1 if table is None else table.shape[1])
        used = face.ints(room, batch, q)
    starts, rows = None, 0
    if cache_leftpad is not None:
        shape = tuple(getattr(cache_leftpad, "shape", ()))
        if shape != (batch,):
            raise InputError(f"cache_leftpad has the shape {shape}: it must be an array ({batch},)")
        k_cache, v_cache, starts, used, table = face.without_padding(
            k_cache, v_cache, cache_leftpad, used, table
        )
        rows = 0 if starts is None else k_cache.shape[0]
    extras = _extras(cu_seqlens_q, starts, None, used, table, alibi_slopes, sinks, longest, rows)
    out, lse = face.attention(q, k_cache, v_cache, *options, extras)
    return (out, lse) if wants_lse else out


# Parts that one call of a kernel merges.
_PARTS = 16


def merge(outs, lses, sinks=None, dtype=None):
    """Merges results over different keys of the same queries into the result over all of them: parts of a
    long cache, a shared prefix and each sequence's own keys, the steps of ring attention.

    `outs` and `lses`: what the functions return with `return_softmax_lse`, of each part, (batch, seqlen_q,
    heads_q, head_dim_v) and (batch, heads_q, seqlen_q), or packed. `sinks`: float32 (heads_q,), which the
    parts leave out. `dtype`: the result's type, that of the parts where None. Computed in float32. Returns
    (out, lse); torch tensors have gradients, of outs and lses.
    """
    outs = [array("a part of outs", part) for part in outs]
    lses = [array("a part of lses", part) for part in lses]
    if not outs or len(outs) != len(lses):
        raise InputError(
            f"there are {len(outs)} outs and {len(lses)} lses: give one of each for every part, at least one"
        )
    lses = [masses("a part of lses", lse, out) for lse, out in zip(lses, outs)]
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
    return merge(*zip(*merged), sinks, dtype)


def flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    sinks=None,
    dlse=None,
):
    """The gradients of `flash_attn_func`, for arrays without autograd: dout, out and softmax_lse are those of
    its result, `dlse` is a gradient of softmax_lse, float32 in its shape. Returns (dq, dk, dv), with sinks
    (dq, dk, dv, dsinks)."""
    extras = _extras(None, None, None, None, None, alibi_slopes, sinks)
    options = (softmax_scale, causal, window_size, softcap, deterministic)
    return _gradients(dout, q, k, v, out, softmax_lse, *options, extras, dlse)


def flash_attn_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    seqused_q=None,
    seqused_k=None,
    sinks=None,
    dlse=None,
):
    """The gradients of `flash_attn_varlen_func`: see `flash_attn_backward`. Rows that no sequence has get
    0."""
    extras = _extras(
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        None,
        alibi_slopes,
        sinks,
        max_seqlen_q,
        max_seqlen_k,
    )
    options = (softmax_scale, causal, window_size, softcap, deterministic)
    return _gradients(dout, q, k, v, out, softmax_lse, *options, extras, dlse)


def _gradients(
    dout, q, k, v, out, lse, scale, causal, window_size, softcap, deterministic, extras, dlse
):
    options = _options(scale, causal, window_size, softcap, deterministic)
    array("dout", dout)
    masses("softmax_lse", lse, array("q", q))
    if dlse is not None:
        masses("dlse", dlse, q)
    dq, dk, dv, dsinks = face_of(q).backward(dout, q, k, v, out, lse, *options, extras, dlse)
    return (dq, dk, dv) if dsinks is None else (dq, dk, dv, dsinks)
