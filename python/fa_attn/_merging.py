"""Results over parts of the keys, merged into one."""

from __future__ import annotations

from reprlib import repr as short
from typing import Any, Iterable, Optional, Tuple

from ._checks import array, check_lse, flag
from ._core import InputError, InputTypeError
from ._faces import face_of, of_one_library
from ._types import A, Array

# The most parts that one launch merges.
PARTS = 16


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
    parts leave out. `dtype`: the result's type; None for that of the parts. Computed in float32. A row of a part
    that sees no key has an LSE of -inf, or of +inf as FlashAttention-2, FlashMLA and `fa_attn.flash_mla` return
    it, and is not read. Returns (out, lse). With torch tensors, outs and lses have gradients.
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
    face = face_of(outs[0], "a part of outs")
    dtype = outs[0].dtype if dtype is None else dtype
    # What is merged again stays in float32, and alone since a call's parts are of one type.
    merged = []
    while len(outs) > PARTS:
        merged.append(face.merge(outs[:PARTS], lses[:PARTS], None, lses[0].dtype))
        outs, lses = outs[PARTS:], lses[PARTS:]
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
    face = face_of(out_partial, "out_partial")
    if out is not None:
        of_one_library("out", out, out_partial, face)
    dtype = out.dtype if out is not None else out_dtype
    lses = [face.swapped(lse) for lse in face.unstack(lse_partial, 0)]
    merged, lse = merge(face.unstack(out_partial, 0), lses, dtype=dtype)
    if out is not None:
        merged = face.stored(merged, out)
    return merged, face.swapped(lse) if flag("return_lse", return_lse) else None
