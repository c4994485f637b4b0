"""Dropout of probabilities as a modification of a call: the bits of what is kept are FlashAttention-2's for
the same seed and offset, on every device and in both passes."""

from __future__ import annotations

import math
import struct
from typing import Any, Optional

from ._checks import number
from ._core import InputError, UnsupportedError
from ._faces import face_of
from ._modifications import Extents, Modifications

# The array of the kept bits, or with torch of the generator's state, and the scalar that they are multiplied
# by.
BITS, FACTOR = "fa_kept", "fa_kept_factor"
_TEXT = (
    f"array {BITS}: bits[_, _, _, _]; scalar {FACTOR}: f32;\n"
    f"weight = select({BITS}[b, h, q, k], {FACTOR}, 0.0);"
)
# What a call moves a generator's offset by, for each query head of each sequence.
ADVANCE = 32


def numbers_of(p):
    """(the factor of what is kept, the largest byte that keeps), in float32 as FlashAttention-2 computes
    them."""

    def rounded(x):
        return struct.unpack("f", struct.pack("f", x))[0]

    keep = rounded(1.0 - rounded(p))
    if not 0.0 < keep <= 1.0:
        raise InputError(f"dropout_p is {p}: it is a probability, at least 0 and below 1")
    return rounded(1.0 / keep), math.floor(keep * 255.0)


def _of_hex(text):
    return float.fromhex(text)


# Called by torch.compile where it traces, not traced.
numbers_of._dynamo_marked_constant = _of_hex._dynamo_marked_constant = True


def probability(p):
    """dropout_p as a float: of a symbol of torch.compile its value, for which the graph then is."""
    p = 0.0 if p is None else number("dropout_p", p)
    return _of_hex(p.hex())


def halves(rng_state):
    """(seed, offset) of a pair of integers, each of 64 bits."""
    try:
        seed, offset = rng_state
        seed, offset = seed.__index__(), offset.__index__()
    except (AttributeError, TypeError, ValueError):
        raise InputError(f"rng_state is {rng_state!r}: it must be (seed, offset), two integers") from None
    for name, value in (("seed", seed), ("offset", offset)):
        if not -(2**63) <= value < 2**64:
            raise InputError(f"rng_state has the {name} {value}: it must fit 64 bits")
    return seed % 2**64, offset % 2**64


def dropping(
    mods: Optional[Modifications], q: Any, extents: Any, dropout_p: Any, rng_state: Any
) -> Optional[Modifications]:
    """A call's modifications with dropout; `extents()` is what the bits are indexed by."""
    p = probability(dropout_p)
    if p == 0.0:
        if rng_state is not None:
            raise InputError("rng_state without dropout_p: nothing is random, leave it out")
        return mods
    factor, threshold = numbers_of(p)
    sizes = Extents(*extents())
    if 0 in sizes:
        return mods
    face = face_of(q)
    if not hasattr(face, "kept"):
        kind = type(q).__module__.split(".")[0]
        raise UnsupportedError(f"dropout_p = {p} with arrays of {kind}: give those of torch, numpy or jax")
    kept = face.kept(q, sizes, threshold, rng_state)
    own = Modifications((_TEXT,), (BITS,), (kept,), ((FACTOR, factor),))
    return own if mods is None else mods.joined(own)
