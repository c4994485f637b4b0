"""What FlashAttention's functions share once they have read their arguments."""

from __future__ import annotations

from ._checks import array, check_backward, check_lse, upper_bound
from ._codes import as_codes, by_factor, coded, holds_codes, no_codes
from ._core import InputError
from ._dropout import dropping
from ._faces import face_of
from ._modifications import asked, extents_of
from ._options import call_options, extras_of, on_values, read_options, returned


def asked_of(q, extents, options, dropout_p):
    """What the keywords of a call and its dropout make of its scores and probabilities."""
    mods = asked(q, extents, options)
    if type(dropout_p) is float and dropout_p == 0.0 and not options:
        return mods
    return dropping(mods, q, extents, dropout_p, options.get("rng_state"))


def attention_of(face, given, numbers, read, beside, dropout_p, out, returns, options, plans=None):
    """The result of a function that has read its arguments: `read` of `read_options`, `beside` for
    `extras_of`."""
    tensors, division = read
    output_scale = options.get("output_scale")
    room = out if output_scale is None else None
    codes, starts = options.get("kv_cache_dtype"), beside.get("cu_seqlens_q")
    q, k, v, tensors, numbers, factor = coded(*given, tensors, numbers, codes, starts, out=room)
    extras = extras_of(**beside, **tensors)
    q, numbers = on_values(face, q, v, options, numbers)
    wants_lse = any(wanted is not False for wanted in returns)
    mods = asked_of(q, lambda: extents_of(q, k, extras), options, dropout_p)
    made, lse = face.attention(
        q, k, v, numbers, extras, plans, out=room, division=division, wants_lse=wants_lse, mods=mods
    )
    if numbers.kv_dtype is not None:
        made, lse = face.refused((made, lse), *given)
    if factor is not None:
        made = by_factor(face, made, room, factor)
    if output_scale is not None:
        made = as_codes(face, made, out, output_scale)
    return returned(made, lse, *returns)


def face_of_stacked(name, stacked, axes, axis, count):
    shape = tuple(array(name, stacked).shape)
    if len(shape) != axes or shape[axis] != count:
        need = "(total, " if axes == 4 else "(batch, seqlen, "
        raise InputError(f"{name} has the shape {shape}: it must be {need}{count}, heads, head_dim)")
    return face_of(stacked)


def of_stacked(function, apart, qkv, packed, dropout_p, numbers, alibi_slopes, returns, options):
    """What the function of this name gives of q, k and v in one array, whose gradient is one array, too.
    `apart`: the function of three arrays; `packed`: the starts of sequences and their upper bound, None of a
    padded batch; `numbers`: the arguments of `call_options`."""
    axis = 2 if packed is None else 1
    face = face_of_stacked("qkv", qkv, axis + 3, axis, 3)
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
        return apart(
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
        mods=asked_of(qkv, extents, options, dropout_p),
    )
    return returned(out, lse, *returns)


def gradients_of(dout, q, k, v, out, lse, numbers, extras, dlse):
    check_backward(dout, q, k, v, out, lse)
    if dlse is not None:
        check_lse("dlse", dlse, q)
    dq, dk, dv, dsinks = face_of(q).backward(dout, q, k, v, out, lse, numbers, extras, dlse)
    return (dq, dk, dv) if dsinks is None else (dq, dk, dv, dsinks)
