"""vLLM's caches of `int4_per_token_head`: rows that a randomised Hadamard transform turns, in codes of 4 bits
with a zero point.

A row x is stored as codes of H S x, where S negates columns and H is Sylvester's matrix of 1 and -1. A byte
holds two codes from 0 to 15, the first in the lower half; the lowest four bits of a row's scale, a float32,
are its zero point, and the others the scale. So a number is (code - zero point) * scale: what int8 holds, with
a descale for each row. The transpose of H S undoes it but for a factor, the head dim, so that queries that are
turned give the scores, and the result is turned back.
"""

from __future__ import annotations

import math

from ._core import InputError

# The name of `kv_cache_dtype`.
TURNED = "int4_per_token_head"
# The columns that are negated, a bit each from the lowest: draws below 1/2 of torch's generator on the CPU
# with the seed 0x9E3779B9 leave a column as it is. Shorter rows take the first.
NEGATED = (
    *(0x9A8CA6F2, 0x7F7FCA4E, 0x59BBC293, 0x9480ABC7, 0xB55B747E, 0x54503BBE, 0xCDF467B7, 0x05DFBC5F),
    *(0xB291E3CC, 0x57563834, 0xE46AE225, 0x67FC4CA6, 0xCFC78691, 0x32D9DFF1, 0x365FDB89, 0x75625346),
)
_MOST = 32 * len(NEGATED)


def check_turned(name, columns):
    """Checks the columns of turned rows."""
    if columns < 2 or columns > _MOST or columns & (columns - 1):
        raise InputError(
            f"{name} has rows of {columns} columns: those of {TURNED} are a power of two, at most {_MOST}"
        )


def factor_of(columns):
    """What turned rows are multiplied by to have their length again."""
    return 1 / math.sqrt(columns)


def hadamard(x, stack):
    """H x of rows in float32, with their length; `stack`: the library's."""
    columns = x.shape[-1]
    step = 1
    while step < columns:
        pairs = x.reshape((*x.shape[:-1], columns // (2 * step), 2, step))
        one, other = pairs[..., 0, :], pairs[..., 1, :]
        x = stack((one + other, one - other), -2).reshape(x.shape)
        step *= 2
    return x * factor_of(columns)
