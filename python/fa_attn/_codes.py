"""K and V in codes, and Q beside them: which arrays hold codes, the forms of descales, and the quantisers.

A value is its code (an e4m3 or e5m2 number, or an integer of 8 bits or 4) times a descale: `k_descale` and
`v_descale`, float32, of the shapes (1,), (heads_kv,), (batch, heads_kv), each broadcast to (batch, heads_kv),
or one for each row of each head, in the shape of k without its last axis. Of packed keys (n, heads_kv) is (batch, heads_kv) where n
is the batch, else (total_k, heads_kv). Where q holds e4m3 codes as well, `q_descale` is of the same shapes but
those of rows, per K/V head, and out is of 16 bits. Codes of e5m2 in q become numbers of 16 bits, exactly.
"""

from __future__ import annotations

import math
from reprlib import repr as short
from typing import Any, Literal, Optional, Tuple

from ._checks import array, check_out, one_of
from ._core import InputError, UnsupportedError
from ._faces import face_of
from ._options import DESCALES
from ._turned_rows import TURNED, check_turned
from ._types import A, Array

# Codes by the names of vLLM's `kv_cache_dtype`.
_ASKED = {
    "fp8": "e4m3",
    "fp8_e4m3": "e4m3",
    "fp8_per_token_head": "e4m3",
    "int8": "int8",
    "int8_per_token_head": "int8",
    "float8_e4m3fn": "e4m3",
    "fp8_e5m2": "e5m2",
    "float8_e5m2": "e5m2",
    "int4": "int4",
    TURNED: TURNED,
}
# Types without codes, which say what the arrays do.
_NUMBERS = ("float16", "bfloat16", "float32")
# Codes by the types of arrays.
_HELD = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "int8"}
# The largest number of each.
_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0, "int4": 7.0}
_SMALLEST_NORMAL = 1.1754943508222875e-38
_LARGEST_FLOAT = 3.4028234663852886e38
_PER = ("tensor", "head", "sequence_head", "token_head")


def _by_descales(face, q, k, v, tensors, numbers, cu_seqlens_q, batch, appends):
    """What `coded` returns of a call with descales of what holds no codes, as engines give them whatever a
    cache holds: factors like any, those of q and k of the queries, that of v of the result."""
    tensors, factors = dict(tensors), {}
    for name in DESCALES:
        x = tensors.get(name)
        if x is None or (name != "q_descale" and numbers.kv_dtype is not None):
            continue
        face.refuse_gradient(name, array(name, x))
        if _type_of(x) != "float32":
            raise InputError(f"{name} holds {_type_of(x)}: it must be float32, convert it once")
        if appends and name != "q_descale":
            raise UnsupportedError(
                f"{name} = {short(x)}: what joins a cache without codes has no descale, leave it out"
            )
        if not face.codes.are_descales(x):
            raise InputError(f"{name} = {short(x)}: a descale is a finite number of 0 or more")
        factors[name] = _form(face, name, x, k, batch, per_row=False)
        del tensors[name]
    heads_q, heads = q.shape[-2], k.shape[-2]
    if heads < 1 or heads_q % heads or not factors:
        # Of heads that do not fit the extension module says so.
        return q, k, v, tensors, numbers, None
    group, of_v = heads_q // heads, factors.pop("v_descale", None)
    for x in factors.values():
        q = face.codes.scaled(q, x, cu_seqlens_q, group)
    return q, k, v, tensors, numbers, None if of_v is None else (of_v, cu_seqlens_q, group)


def by_factor(face, out, given, factor):
    """The result times the descale of v that `coded` returns, or turned back; `given`: the array of the
    caller's that the result is written to."""
    scaled = face.codes.turned(out, back=True) if factor == TURNED else face.codes.scaled(out, *factor)
    return scaled if given is None else face.stored(scaled, given)


def as_codes(face, made, out, output_scale):
    """The result as codes of e4m3 that stand for it by `output_scale`, in `out` where the caller gives it."""
    if getattr(made, "requires_grad", False):
        raise UnsupportedError(
            "output_scale: a result in codes has no gradients, detach q, k and v or use torch.no_grad()"
        )
    if _type_of(array("output_scale", output_scale)) != "float32" or math.prod(output_scale.shape) != 1:
        have = f"{_type_of(output_scale)} of the shape {tuple(output_scale.shape)}"
        raise InputError(f"output_scale is {have}: it must be one float32, by which the result is divided")
    codes, _ = face.codes.quantized(made, "e4m3", _LARGEST["e4m3"], None, output_scale)
    return codes if out is None else face.stored(codes, check_out(out, codes.shape, codes.dtype))


def _type_of(x):
    return str(getattr(x, "dtype", None)).rpartition(".")[2]


def holds_codes(x):
    """Whether an array's elements may be codes: of one byte."""
    held = _type_of(x)
    return held in ("uint8", "int8") or held.startswith("float8")


def asked_codes(cache_dtype, k):
    """The codes that `kv_cache_dtype` names; None where k says, or is of the type that it names."""
    if cache_dtype is None or cache_dtype == "auto":
        return None
    # A type's name, too.
    name = str(cache_dtype).rpartition(".")[2]
    if name not in _ASKED:
        if name in _NUMBERS and name == _type_of(k):
            return None
        need = ", ".join(map(repr, (*_ASKED, *_NUMBERS)))
        held = f"; k holds {_type_of(k)}" if name in _NUMBERS else ""
        raise UnsupportedError(f"kv_cache_dtype = {short(cache_dtype)}: use 'auto' or one of {need}{held}")
    return _ASKED[name]


def _codes_of(name, x, asked):
    """The codes that an array holds; None for numbers."""
    held = _type_of(x)
    if held == "uint8":
        if asked in ("e4m3", "e5m2", "int4"):
            return asked
        raise UnsupportedError(
            f"{name} holds uint8: where its bytes are e4m3 codes give kv_cache_dtype='fp8_e4m3', or view it "
            "as float8_e4m3fn; of e5m2 'fp8_e5m2'; where they are two codes of int4 each give "
            "kv_cache_dtype='int4'"
        )
    if held.startswith("float8") and held not in _HELD:
        raise UnsupportedError(
            f"{name} holds {held}: K and V in codes are float8_e4m3fn, float8_e5m2, int8, or uint8 "
            "with kv_cache_dtype"
        )
    own = _HELD.get(held)
    if asked is not None and own != asked:
        raise InputError(f"{name} holds {held} and kv_cache_dtype says {asked}: give one of them")
    return own


def no_codes(name, options):
    """Refuses what is of codes beside an array of q, k and v that holds none."""
    for given in ("kv_cache_dtype", *DESCALES):
        value = options.get(given)
        if value is not None and not (isinstance(value, str) and value == "auto"):
            raise UnsupportedError(f"{given}: {name} holds no codes, leave it out")


def coded(
    q,
    k,
    v,
    tensors,
    numbers,
    asked=None,
    cu_seqlens_q=None,
    names=("k", "v"),
    is_cache=False,
    appends=False,
    out=None,
):
    """(q, k, v, tensors, numbers, factor) with k and v, and perhaps q, as bytes, descales by their forms and
    the codes' name, where k and v hold codes; else what was given. `factor`: for `by_factor`, or None.
    `names`: those of k and v for errors; `is_cache`: gradients are not asked for; `appends`: rows join a
    cache; `out`: the array that the result is written to."""
    dtype = getattr(q, "dtype", k)
    if asked is None and getattr(k, "dtype", None) is dtype and getattr(dtype, "itemsize", 2) > 1:
        if not (tensors and any(name in tensors for name in DESCALES)):
            return q, k, v, tensors, numbers, None
    asked, factor = asked_codes(asked, k), None
    if asked == TURNED:
        q, k, v, tensors = _with_turned_queries(q, k, v, tensors, names, appends)
        asked, factor = "int8", TURNED
    codes, other = (_codes_of(name, x, asked) for name, x in zip(names, (k, v)))
    held = _type_of(q)
    if codes is not None and (held == "float8_e5m2" or (held == "uint8" and asked == "e5m2")):
        of_library = face_of(array("q", q)).codes
        q = of_library.decoded(q, None, of_library.NUMBERS, "e5m2")
    is_fp8 = holds_codes(q)
    if is_fp8:
        if held in ("int8", "float8_e5m2"):
            raise UnsupportedError(
                f"q holds {held}, k and v {asked or _type_of(k)}: q of 8 bits is float8_e4m3fn, with k and v "
                "like it, or float8_e5m2 beside codes; beside others give q in 16 bits"
            )
        if asked == "int4":
            raise UnsupportedError(f"q holds {held}: beside k and v in int4 it is of 16 bits, or float32")
        if not codes == other == _codes_of("q", q, asked):
            types = f"{names[0]} {_type_of(k)} and {names[1]} {_type_of(v)}"
            raise InputError(f"q holds {held}, {types}: give all three in float8_e4m3fn, or q in 16 bits")
    has_descales = any(name in tensors for name in DESCALES)
    if codes is other is None and not has_descales:
        return q, k, v, tensors, numbers, None
    face = face_of(array("q", q))
    for name, x in zip(names, (k, v)):
        array(name, x)
    batch = q.shape[0] if cu_seqlens_q is None else array("cu_seqlens_q", cu_seqlens_q).shape[0] - 1
    if codes != other:
        held = f"{names[0]} holds {_type_of(k)} and {names[1]} {_type_of(v)}"
        raise InputError(f"{held}: give both in one type")
    if len(k.shape) < 3:
        raise InputError(f"{names[0]} has the shape {tuple(k.shape)}: it must have 3 or 4 axes")
    numbers = numbers._replace(kv_dtype=codes)
    if not is_fp8 and has_descales:
        q, k, v, tensors, numbers, of_v = _by_descales(
            face, q, k, v, tensors, numbers, cu_seqlens_q, batch, appends
        )
        if codes is None:
            return q, k, v, tensors, numbers, of_v
    descales = {}
    for name in DESCALES:
        if name in tensors:
            face.refuse_gradient(name, tensors[name])
            descales[name] = _form(face, name, tensors[name], k, batch, name != "q_descale")
    if not is_cache:
        q = face.cut_off(q, k, v, out)
    if is_fp8:
        q, numbers = face.bits(q), numbers._replace(out_dtype=face.out_of_codes(q))
    return q, face.bits(k), face.bits(v), {**tensors, **descales}, numbers, factor


def _with_turned_queries(q, k, v, tensors, names, appends):
    """(q, k, v, tensors) of a call on rows of vLLM's `int4_per_token_head`: q turned, k and v as int8."""
    if appends:
        raise UnsupportedError(
            f"kv_cache_dtype = {TURNED!r}: rows that join such a cache are written by vLLM, leave k and v out"
        )
    if holds_codes(array("q", q)):
        raise UnsupportedError(f"q holds {_type_of(q)}: beside {TURNED} it is of 16 bits, or float32")
    tensors, made = dict(tensors), []
    for name, x, of in zip(names, (k, v), ("k_descale", "v_descale")):
        if _type_of(array(name, x)) != "uint8":
            raise InputError(f"{name} holds {_type_of(x)}: codes of {TURNED} are uint8, two to a byte")
        scales = tensors.get(of)
        if scales is None:
            raise InputError(f"{of}: the scales of {TURNED}, one for each row of each head, are missing")
        if not _are_equal(tuple(array(of, scales).shape), tuple(x.shape[:-1])):
            rows = tuple(x.shape[:-1])
            raise InputError(f"{of} has the shape {tuple(scales.shape)}: scales of {TURNED} have {rows}")
        if _type_of(scales) != "float32":
            raise InputError(f"{of} holds {_type_of(scales)}: scales of {TURNED} are float32")
        check_turned(name, 2 * x.shape[-1])
        numbers, descale = face_of(x).codes.without_zero_points(x, scales)
        made.append(numbers)
        tensors[of] = descale
    if q.shape[-1] != made[0].shape[-1]:
        raise InputError(f"{names[0]} has rows of {made[0].shape[-1]} columns and q of {q.shape[-1]}")
    return face_of(q).codes.turned(q, back=False), *made, tensors


def joining(q, k, v, descales, numbers):
    """(q, k, v, descales) for an append to a cache of codes. What holds codes already, by the cache's
    descales, becomes the values that they are without any."""
    rows, descales = [k, v], list(descales)
    for at, name in enumerate("kv"):
        x = array(name, rows[at])
        if not holds_codes(x):
            continue
        held = _type_of(x)
        kinds = {
            "e4m3": ("float8_e4m3fn", "uint8"),
            "e5m2": ("float8_e5m2", "uint8"),
            "int8": ("int8",),
            "int4": ("uint8",),
        }
        if held not in kinds[numbers.kv_dtype]:
            need = f"codes of {kinds[numbers.kv_dtype][0]}, or values of 16 bits"
            raise InputError(f"{name} holds {held} and {name}_cache codes of {numbers.kv_dtype}: give {need}")
        if is_per_row(descales[at]):
            raise InputError(
                f"{name} holds codes, and {name}_descale is written with each row: give {name} in 16 bits"
            )
        of_library = face_of(x).codes
        wide = of_library.WIDE if holds_codes(q) else q.dtype
        rows[at] = of_library.decoded(x, None, wide, numbers.kv_dtype)
        descales[at] = None
    if holds_codes(q):
        q = face_of(q).codes.decoded(q, None, rows[0].dtype, "e4m3")
    return (q, *rows, descales)


def encoded(x):
    """Values as codes of e4m3 without a descale."""
    return face_of(x).codes.encoded(x)


def _form(face, name, x, k, batch, per_row):
    """Descales in one of the forms that the extension module takes."""
    shape, rows, heads = tuple(array(name, x).shape), tuple(k.shape[:-1]), k.shape[-2]
    if per_row and _are_equal(shape, rows) and (len(rows) == 3 or rows[0] != batch):
        return x
    if _are_equal(shape, (heads,)):
        return x
    if all(n == 1 for n in shape):
        return face.expanded(x, (heads,))
    if len(shape) == 2 and _is_broadcast(shape, (batch, heads)):
        return face.expanded(x, (batch, heads))
    rows = f" or, for each row, {rows}" if per_row else ""
    raise InputError(f"{name} has the shape {shape}: it must be (1,), ({heads},), ({batch}, {heads}){rows}")


def _are_equal(one, other):
    """Whether two shapes are equal. torch.compile takes a number and a symbol as different where tuples are
    compared."""
    if len(one) != len(other):
        return False
    for a, b in zip(one, other):
        if a != b:
            return False
    return True


def _is_broadcast(shape, to):
    for a, b in zip(shape, to):
        if a != 1 and a != b:
            return False
    return True


def is_per_row(x):
    """Whether descales of a cache are one for each row of each head."""
    return x is not None and len(x.shape) == 3


def quantize_kv(
    x: A,
    dtype: Literal["e4m3", "int8", "int4", "e5m2"] = "e4m3",
    per: Literal["tensor", "head", "sequence_head", "token_head"] = "head",
    descale: Optional[Array] = None,
) -> Tuple[Any, Any]:
    """(codes, descale) of keys or values x (batch, seqlen, heads, head_dim), packed (total, heads, head_dim),
    or in pages (pages, page, heads, head_dim).

    `per`: which values share a descale, amax / 448 of e4m3, amax / 57344 of e5m2, amax / 127 of int8 and
    amax / 7 of int4 (at least the smallest normal number): all, those of a head, of a sequence and head, or
    of a row and head. `descale`: descales to use instead, of a shape that the functions take. Values are
    multiplied by 1 / descale, clamped and rounded to nearest even; infinities become the largest code; NaN
    stays NaN in e4m3 and e5m2, and becomes 0 in integers. Codes are float8_e4m3fn, float8_e5m2 or int8 for
    torch and jax, else numpy's uint8 (the bits; give the functions kv_cache_dtype='fp8_e4m3' or 'fp8_e5m2')
    or int8; of int4 uint8 with half as many columns, two codes to a byte, the first in the lower half (give
    the functions kv_cache_dtype='int4').
    """
    codes = one_of("dtype", dtype, tuple(_LARGEST))
    rows = len(array("x", x).shape)
    if rows not in (3, 4):
        raise InputError(f"x has the shape {tuple(x.shape)}: it must have 3 or 4 axes")
    if codes == "int4" and x.shape[-1] % 2:
        raise InputError(f"x has rows of {x.shape[-1]} columns: a byte holds two codes of int4, pad with zeros")
    one_of("per", per, _PER)
    if per == "sequence_head" and rows == 3:
        raise InputError("per = 'sequence_head': packed rows do not say of which sequence they are")
    # The axes along which values share a descale.
    axes = {
        "tensor": tuple(range(rows)),
        "head": (*range(rows - 2), rows - 1),
        "sequence_head": (1, 3),
        "token_head": (rows - 1,),
    }[per]
    if descale is not None:
        array("descale", descale)
    return face_of(x).codes.quantized(x, codes, _LARGEST[codes], axes, descale)


def dequantize_kv(
    codes: A,
    descale: Optional[Array] = None,
    dtype: Any = None,
    kv_dtype: Literal["e4m3", "int8", "int4", "e5m2", None] = None,
) -> Any:
    """The values of codes as `quantize_kv` gives them: float32, or of `dtype`. uint8 is read as e4m3, with
    kv_dtype='e5m2' as that, or with kv_dtype='int4' as two codes to a byte."""
    held = _type_of(array("codes", codes))
    known = ("e4m3", "e5m2", "int4") if held == "uint8" else (_HELD.get(held),)
    if None in known:
        need = "uint8 (the bits of e4m3 or e5m2, or two codes of int4), float8_e4m3fn, float8_e5m2 or int8"
        raise InputError(f"codes holds {codes.dtype}: it must be {need}")
    kind = known[0] if kv_dtype is None else one_of("kv_dtype", kv_dtype, tuple(_LARGEST))
    if kind not in known:
        raise InputError(f"codes holds {codes.dtype} and kv_dtype is {kind!r}: give one of {known}")
    return face_of(codes).codes.decoded(codes, descale, dtype, kind)


def broadcast_shape(descale, codes):
    """The shape in which descales are multiplied with codes (or values)."""
    shape, rows = tuple(descale.shape), tuple(codes.shape)
    if _are_equal(shape, rows[:-1]):
        return (*shape, 1)
    if all(n == 1 for n in shape):
        return (1,)
    if len(shape) == 2 and len(rows) == 4 and _is_broadcast(shape, (rows[0], rows[2])):
        return (shape[0], 1, shape[1], 1)
    if len(shape) == 1 and shape[0] == rows[-2]:
        return (*shape, 1)
    need = f"(1,), ({rows[-2]},), {rows[:1] + rows[-2:-1]} or {rows[:-1]}"
    raise InputError(f"descale has the shape {shape}: it must be {need}")

