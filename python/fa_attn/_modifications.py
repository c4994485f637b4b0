"""A call's own mask and change of scores: biases, masks and programs of the caller's as the texts, arrays and
scalars that the extension module takes."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Optional, Tuple

from ._blocks import indices_of, of_tensors
from ._checks import count, flag, wants_gradient
from ._core import InputError, InputTypeError, UnsupportedError
from ._faces import face_of
from ._options import MODIFICATIONS
from ._programs import Program

# The declaration of an array, and its name.
_DECLARED = re.compile(r"(\barray\s+(\w+)\s*:[^;]*?\])(?:\s*grad)?(\s*aligned)?\s*;")


class Modifications(NamedTuple):
    """Programs in the order in which they change scores, and what they read by name."""

    texts: Tuple[str, ...] = ()
    names: Tuple[str, ...] = ()
    arrays: Tuple[Any, ...] = ()
    scalars: Tuple[Tuple[str, float], ...] = ()

    def joined(self, other: Modifications) -> Modifications:
        """These, then the other."""
        arrays = dict(zip(self.names, self.arrays))
        for name, array in zip(other.names, other.arrays):
            if arrays.setdefault(name, array) is not array:
                raise InputError(f"two programs of a call read other arrays of the name {name}: rename one")
        scalars = dict(self.scalars)
        for name, value in other.scalars:
            if scalars.setdefault(name, value) != value:
                raise InputError(f"two programs of a call read other scalars of the name {name}: rename one")
        texts = (*self.texts, *other.texts)
        return Modifications(texts, tuple(arrays), tuple(arrays.values()), tuple(scalars.items()))

    def with_arrays(self, arrays) -> Modifications:
        return self._replace(arrays=tuple(arrays))

    def with_gradients(self, names) -> Modifications:
        """These, with gradients for the arrays of these names and no others."""

        def declared(found):
            return f"{found[1]}{' grad' if found[2] in names else ''}{found[3] or ''};"

        return self._replace(texts=tuple(_DECLARED.sub(declared, text) for text in self.texts))

    def moved(self, first, whole=(), keep=None) -> Modifications:
        """These for a part of a call: of the variables of `first` the part's begin at these numbers, those of
        `whole` have these values. By scalars, so that all parts have one kernel. `keep`: a pattern of texts
        that are left as they are."""
        texts, scalars = [], list(self.scalars)
        for at, text in enumerate(self.texts):
            if keep is None or not keep.match(text):
                for variable, value in (*first.items(), *dict(whole).items()):
                    name = f"fa_part_{variable}_{at}"
                    other = f"({variable} + {name})" if variable in first else name
                    text, count = re.subn(rf"\b{variable}\b", other, text)
                    if count:
                        text = f"scalar {name}: i32;\n{text}"
                        scalars.append((name, value))
            texts.append(text)
        return self._replace(texts=tuple(texts), scalars=tuple(scalars))

    @property
    def programs(self):
        """As the extension module takes them."""
        return list(self.texts), list(zip(self.names, self.arrays)), list(self.scalars)


class Extents(NamedTuple):
    """What a bias or a mask is indexed by: sequences, query heads, and the most queries and keys of one."""

    batch: int
    heads: int
    rows: int
    keys: int


def extents_of(q, k, extras=None) -> Extents:
    """Those of a call's arrays."""
    heads = q.shape[-2]
    starts_q, starts_k, table = (None,) * 3
    if extras is not None:
        starts_q, starts_k, table = extras.cu_seqlens_q, extras.cu_seqlens_k, extras.page_table
    batch = q.shape[0] if starts_q is None else starts_q.shape[0] - 1
    rows = q.shape[1] if starts_q is None else min(extras.max_seqlen_q, q.shape[0])
    if table is not None:
        keys = table.shape[1] * k.shape[1]
    else:
        keys = k.shape[1] if starts_k is None else min(extras.max_seqlen_k, k.shape[0])
    return Extents(batch, heads, rows, keys)


# The types that a bias may have, by the names of libraries.
_FLOATS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_AXES = ("batch", "heads", "queries", "keys")


def type_name(array: Any) -> str:
    return str(array.dtype).rsplit(".", 1)[-1]


def broadcast(name: str, array: Any, extents: Optional[Extents]) -> Any:
    """The array with four axes, checked to be broadcast to the extents."""
    shape = tuple(getattr(array, "shape", ()))
    if not hasattr(array, "dtype"):
        raise InputTypeError(f"{name} is {type(array).__name__}: it must be an array")
    if type(array).__name__ == "CausalBias":
        raise InputTypeError(
            f"{name} is a CausalBias of torch, which has no elements: give causal=True, or a mask_mod"
        )
    if len(shape) > 4:
        raise InputError(
            f"{name} has the shape {shape}: it must be broadcast to (batch, heads, queries, keys)"
        )
    shape = (1,) * (4 - len(shape)) + shape
    if extents is not None:
        for axis, have, need in zip(_AXES, shape, extents):
            if have != 1 and have != need:
                raise InputError(
                    f"{name} has {have} along {axis} where the call has {need}: it must be broadcast to "
                    f"{tuple(extents)}"
                )
    return array.reshape(shape) if len(array.shape) < 4 else array


def additive(name: str, array: Any, extents: Optional[Extents], at: str = "b, h, q, k") -> Modifications:
    """An array that is added to the scores. One without elements is of a call without scores."""
    array = broadcast(name, array, extents)
    if 0 in array.shape:
        return Modifications()
    array = face_of(array).narrow(array)
    if type_name(array) == "float64":
        array = face_of(array).floats32(array)
    element = _FLOATS.get(type_name(array))
    if element is None:
        also = "bool, " if name == "mask" else ""
        raise InputTypeError(
            f"{name} holds {type_name(array)}: it must be {also}float32, float16 or bfloat16"
        )
    gradient = " grad" if wants_gradient(array) else ""
    own = f"fa_{name}"
    text = f"array {own}: {element}[_, _, _, _]{gradient};\nscore = s + {own}[{at}];"
    return Modifications((text,), (own,), (array,))


def masking(name: str, array: Any, extents: Optional[Extents]) -> Modifications:
    """An array that hides keys: where it is False, or by the number that is added to the score."""
    if not hasattr(array, "dtype") or type_name(array) != "bool":
        return additive(name, array, extents)
    face = face_of(array)
    array = broadcast(name, array, extents)
    if 0 in array.shape:
        return Modifications()
    bits = face.packed_bits(array)
    own = f"fa_{name}_bits"
    text = f"array {own}: bits[_, _, _, _];\nmask = {own}[{_places(array, extents)}];"
    return Modifications((text,), (own,), (bits,))


def _places(array: Any, extents: Optional[Extents]) -> str:
    """The indices of an array that is broadcast to the extents."""
    needs = extents or (1,) * 4
    shared = (have == 1 and need > 1 for have, need in zip(array.shape[:3], needs))
    return indices_of("bhq", shared) + ", k"


def chunked(chunk: int) -> Modifications:
    """Llama 4's and FlashAttention-3's chunks: aligned at the end of the keys."""
    text = "scalar fa_chunk: i32;\nmask = (q + off) // fa_chunk == k // fa_chunk;"
    return Modifications((text,), (), (), (("fa_chunk", chunk),))


def of_program(program: Program) -> Modifications:
    for name, array in program.arrays.items():
        if wants_gradient(array) and name not in program.gradients:
            raise InputError(f"the array {name} requires a gradient: declare it with `grad`, or detach it")
    return Modifications(
        (program.text,), tuple(program.arrays), tuple(program.arrays.values()), tuple(program.scalars.items())
    )


def modifications(
    q,
    extents,
    *,
    score_mod=None,
    mask_mod=None,
    bias=None,
    mask=None,
    attention_chunk=None,
    block_sparse_tensors=None,
) -> Optional[Modifications]:
    """What a call's options make of its scores; None where they change nothing."""
    parts = []
    if bias is not None:
        if hasattr(bias, "dtype") and type_name(bias) == "bool":
            raise InputTypeError("bias holds bool: what is True where a key is seen is a mask")
        parts.append(additive("bias", bias, extents))
    if mask is not None:
        parts.append(masking("mask", mask, extents))
    if attention_chunk is not None:
        chunk = count("attention_chunk", attention_chunk)
        if chunk:
            parts.append(chunked(chunk))
    device = getattr(q, "device", None)
    if block_sparse_tensors is not None:
        lengths = (extents.rows, extents.keys)
        parts.append(of_program(of_tensors(block_sparse_tensors, mask_mod, lengths)))
    elif mask_mod is not None:
        parts.append(of_program(Program.of_mask(mask_mod, device, extents)))
    if score_mod is not None:
        parts.append(of_program(Program.of_score(score_mod, device, extents)))
    if not parts:
        return None
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.joined(part)
    return whole if whole.texts else None


# Of a rank that has every `world`-th key of the whole, of which there are `whole`.
_OF_RANK = """array whole: i32[_];
scalar world: i32;
scalar rank: i32;
mask = k * world + rank < whole[b] - sq + 1 + q;"""


def keys_of_rank(whole: Any, world: Any, rank: Any) -> Program:
    """The causal mask of a rank whose key k is that of the place k * world + rank in the whole. `whole`: keys
    of the whole of each sequence."""
    world = count("cp_world_size", world, 1)
    return Program(
        _OF_RANK, {"whole": whole}, {"world": world, "rank": count("cp_rank", rank, largest=world - 1)}
    )


def of_rank(causal: Any, window: Any, options: Any) -> Tuple[Any, Any]:
    """(causal, options) of a call on a rank's keys, by vLLM's `cp_world_size`, `cp_rank` and
    `cp_tot_seqused_k`; without a causal mask a rank's keys are seen as they are."""
    names = ("cp_world_size", "cp_rank", "cp_tot_seqused_k")
    world, rank, whole = (options.get(name) for name in names)
    if window is not None and tuple(window) not in ((-1, -1), (None, None), (-1, 0)):
        raise UnsupportedError(f"cp_world_size = {world} with a window: keys of a rank have no neighbours")
    kept = {name: x for name, x in options.items() if name not in names}
    if window is not None and tuple(window) == (-1, 0):
        causal = True
    if not flag("causal", causal):
        return False, kept
    if whole is None:
        raise InputError("cp_world_size without cp_tot_seqused_k: give keys of the whole, (batch,)")
    if kept.get("mask_mod") is not None:
        raise UnsupportedError(
            f"cp_world_size = {world} with mask_mod: write the mask of the rank's keys into it"
        )
    kept["mask_mod"] = keys_of_rank(whole, world, 0 if rank is None else rank)
    return False, kept


def asked(q: Any, extents: Any, options: Any) -> Optional[Modifications]:
    """Those of a function's keyword arguments; `extents()` is what biases and masks are indexed by."""
    if not options:
        return None
    given = {name: options[name] for name in MODIFICATIONS if options.get(name) is not None}
    return modifications(q, extents(), **given) if given else None
