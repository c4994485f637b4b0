"""K and V in 8 bits, and Q beside them: which arrays hold codes, the forms of descales, and the quantisers.

A value is its code (an e4m3 number, or an integer) times a descale: `k_descale` and `v_descale`, float32, of
the shapes (1,), (heads_kv,), (batch, heads_kv), each broadcast to (batch, heads_kv), or one for each row of
each head, in the shape of k without its last axis. Of packed keys (n, heads_kv) is (batch, heads_kv) where n
is the batch, else (total_k, heads_kv). Where q holds e4m3 codes as well, `q_descale` is of the same shapes but
those of rows, per K/V head, and out is of 16 bits.
"""

from __future__ import annotations

from importlib import import_module
from reprlib import repr as short
from typing import Any, Literal, Optional, Tuple

from ._checks import array, one_of
from ._core import InputError, UnsupportedError
from ._faces import face_of
from ._types import A, Array

# Codes by the names of vLLM's `kv_cache_dtype`.
_ASKED = {
    "fp8": "e4m3",
    "fp8_e4m3": "e4m3",
    "fp8_per_token_head": "e4m3",
    "int8": "int8",
    "int8_per_token_head": "int8",
}
# Codes by the types of arrays.
_HELD = {"float8_e4m3fn": "e4m3", "int8": "int8"}
# The largest number of each.
_LARGEST = {"e4m3": 448.0, "int8": 127.0}
_SMALLEST_NORMAL = 1.1754943508222875e-38
_LARGEST_FLOAT = 3.4028234663852886e38
_PER = ("tensor", "head", "sequence_head", "token_head")
DESCALES = ("q_descale", "k_descale", "v_descale")


def _no_descale_of(tensors):
    """Refuses a descale of a q that holds no codes."""
    if "q_descale" in tensors:
        given = short(tensors["q_descale"])
        advice = "q is of 16 bits and has no descale, multiply softmax_scale by it"
        raise UnsupportedError(f"q_descale = {given}: {advice}")


def _type_of(x):
    return str(getattr(x, "dtype", None)).rpartition(".")[2]


def asked_codes(cache_dtype):
    """The codes that `kv_cache_dtype` names; None where the arrays say."""
    if cache_dtype is None or cache_dtype == "auto":
        return None
    if cache_dtype not in _ASKED:
        need = ", ".join(map(repr, _ASKED))
        raise UnsupportedError(f"kv_cache_dtype = {short(cache_dtype)}: use 'auto' or one of {need}")
    return _ASKED[cache_dtype]


def _codes_of(name, x, asked):
    """The codes that an array holds; None for numbers."""
    held = _type_of(x)
    if held == "uint8":
        if asked == "e4m3":
            return asked
        raise UnsupportedError(
            f"{name} holds uint8: where its bytes are e4m3 codes give kv_cache_dtype='fp8_e4m3', or view it "
            "as float8_e4m3fn"
        )
    if held.startswith("float8") and held not in _HELD:
        raise UnsupportedError(f"{name} holds {held}: K and V of 8 bits are float8_e4m3fn or int8")
    own = _HELD.get(held)
    if asked is not None and own != asked:
        raise InputError(f"{name} holds {held} and kv_cache_dtype says {asked}: give one of them")
    return own


def no_codes(name, options):
    """Refuses `kv_cache_dtype` where k and v are parts of an array with q."""
    if asked_codes(options.get("kv_cache_dtype")) is not None:
        raise UnsupportedError(f"kv_cache_dtype: {name} has q, k and v of one type, give them apart")
    for descale in DESCALES:
        if options.get(descale) is not None:
            raise UnsupportedError(f"{descale}: {name} is of 16 bits, give q, k and v of 8 bits apart")


def coded(q, k, v, tensors, numbers, asked=None, cu_seqlens_q=None, names=("k", "v"), is_cache=False):
    """(q, k, v, tensors, numbers) with k and v, and perhaps q, as bytes, descales by their forms and the
    codes' name, where k and v hold codes; else what was given. `names`: those of k and v for errors;
    `is_cache`: gradients are not asked for."""
    dtype = getattr(q, "dtype", k)
    if asked is None and getattr(k, "dtype", None) is dtype and getattr(dtype, "itemsize", 2) > 1:
        _no_descale_of(tensors)
        return q, k, v, tensors, numbers
    asked = asked_codes(asked)
    codes, other = (_codes_of(name, x, asked) for name, x in zip(names, (k, v)))
    held = _type_of(q)
    is_fp8 = held in ("uint8", "int8") or held.startswith("float8")
    if is_fp8:
        if held == "int8":
            raise UnsupportedError("q holds int8: q of 8 bits is float8_e4m3fn, with k and v like it")
        if not codes == other == _codes_of("q", q, asked):
            types = f"{names[0]} {_type_of(k)} and {names[1]} {_type_of(v)}"
            raise InputError(f"q holds {held}, {types}: give all three in float8_e4m3fn, or q in 16 bits")
    else:
        _no_descale_of(tensors)
    if codes is other is None:
        return q, k, v, tensors, numbers
    face = face_of(array("q", q))
    for name, x in zip(names, (k, v)):
        array(name, x)
    batch = q.shape[0] if cu_seqlens_q is None else array("cu_seqlens_q", cu_seqlens_q).shape[0] - 1
    if codes != other:
        held = f"{names[0]} holds {_type_of(k)} and {names[1]} {_type_of(v)}"
        raise InputError(f"{held}: give both in one type")
    if len(k.shape) < 3:
        raise InputError(f"{names[0]} has the shape {tuple(k.shape)}: it must have 3 or 4 axes")
    descales = {}
    for name in DESCALES:
        if name in tensors:
            face.refuse_gradient(name, tensors[name])
            descales[name] = _form(face, name, tensors[name], k, batch)
    if not is_cache:
        for name, x in zip(("q", *names), (q, k, v)):
            face.refuse_gradient(name, x)
    if is_fp8:
        q, numbers = face.bits(q), numbers._replace(out_dtype=face.out_of_codes(q))
    return q, face.bits(k), face.bits(v), {**tensors, **descales}, numbers._replace(kv_dtype=codes)


def _form(face, name, x, k, batch):
    """Descales in one of the forms that the extension module takes."""
    shape, rows, heads = tuple(array(name, x).shape), tuple(k.shape[:-1]), k.shape[-2]
    per_row = name != "q_descale"
    if per_row and len(shape) == len(rows) and shape == rows and (len(rows) == 3 or rows[0] != batch):
        return x
    if shape == (heads,):
        return x
    if all(n == 1 for n in shape):
        return face.expanded(x, (heads,))
    if len(shape) == 2 and shape[0] in (1, batch) and shape[1] in (1, heads):
        return face.expanded(x, (batch, heads))
    rows = f" or, for each row, {rows}" if per_row else ""
    raise InputError(f"{name} has the shape {shape}: it must be (1,), ({heads},), ({batch}, {heads}){rows}")


def is_per_row(x):
    """Whether descales of a cache are one for each row of each head."""
    return x is not None and len(x.shape) == 3


def quantize_kv(
    x: A,
    dtype: Literal["e4m3", "int8"] = "e4m3",
    per: Literal["tensor", "head", "sequence_head", "token_head"] = "head",
    descale: Optional[Array] = None,
) -> Tuple[Any, Any]:
    """(codes, descale) of keys or values x (batch, seqlen, heads, head_dim), packed (total, heads, head_dim),
    or in pages (pages, page, heads, head_dim).

    `per`: which values share a descale, amax / 448 of e4m3 and amax / 127 of int8 (at least the smallest
    normal number): all, those of a head, of a sequence and head, or of a row and head. `descale`: descales to
    use instead, of a shape that the functions take. Values are multiplied by 1 / descale, clamped and rounded
    to nearest even; infinities become the largest code; NaN stays NaN in e4m3, and becomes 0 in int8. Codes are
    torch.float8_e4m3fn or int8 for torch, else numpy's uint8 (the bits of e4m3; give the functions
    kv_cache_dtype='fp8_e4m3') or int8.
    """
    codes = one_of("dtype", dtype, tuple(_LARGEST))
    rows = len(array("x", x).shape)
    if rows not in (3, 4):
        raise InputError(f"x has the shape {tuple(x.shape)}: it must have 3 or 4 axes")
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
    face = _quantisers(x)
    return face.quantized(x, codes, _LARGEST[codes], axes, descale)


def dequantize_kv(codes: A, descale: Optional[Array] = None, dtype: Any = None) -> Any:
    """The values of codes as `quantize_kv` gives them: float32, or of `dtype`. uint8 is read as e4m3."""
    array("codes", codes)
    face = _quantisers(codes)
    return face.decoded(codes, descale, dtype)


def broadcast_shape(descale, codes):
    """The shape in which descales are multiplied with codes (or values)."""
    shape, rows = tuple(descale.shape), tuple(codes.shape)
    if shape == rows[:-1]:
        return (*shape, 1)
    if len(shape) == 2 and len(rows) == 4:
        return (shape[0], 1, shape[1], 1)
    if len(shape) == 1 and shape[0] in (1, rows[-2]):
        return (*shape, 1)
    if all(n == 1 for n in shape):
        return (1,)
    need = f"(1,), ({rows[-2]},), {rows[:1] + rows[-2:-1]} or {rows[:-1]}"
    raise InputError(f"descale has the shape {shape}: it must be {need}")


def _quantisers(x):
    return import_module("._torch_codes" if face_of(x).has_autograd else "._numpy_codes", __package__)
