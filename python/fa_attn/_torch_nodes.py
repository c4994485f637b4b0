"""What a program computes, by torch's operations on tensors of four axes: batch, heads, queries and keys."""

from __future__ import annotations

import json
from functools import lru_cache, reduce

import torch

from . import _core
from ._programs import description_of
from ._torch_memory import FLOAT

_INT = torch.int32


def joined(texts):
    """The text of the program that a call's programs are together."""
    return reduce(_core.program_with, texts)


@lru_cache(maxsize=4096)
def described(text):
    """What a program is: `nodes`, each an operation and its operands; `elements`, the element types of its
    arrays by their names; `mask`, `score`, `weight` and `slope`, the derivative of the score: the places of
    the nodes that are these, or None; `gradients`: of loads, and the score's by them."""
    elements = {array["name"]: array["element"] for array in description_of(text)["arrays"]}
    return dict(json.loads(_core.program_nodes(text)), elements=elements)


def _shifted(operation, x, by, outside):
    fits = (by >= 0) & (by < 32)
    return torch.where(fits, operation(x, by.clamp(0, 31)), outside(x))


def _to_int(x):
    if x.dtype == torch.bool:
        return x.to(_INT)
    return x.double().nan_to_num(0.0).clamp(-(2**31), 2**31 - 1).to(_INT)


# By the names of fa_core::program's operations, whose results they are at the edges too.
_OPERATIONS = {
    "neg": torch.neg,
    "~": torch.bitwise_not,
    "abs": torch.abs,
    "floor": torch.floor,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "f32": lambda x: x.to(FLOAT),
    "i32": _to_int,
    "+": torch.add,
    "-": torch.sub,
    "*": torch.mul,
    "/": torch.div,
    "//": lambda x, by: torch.floor_divide(x, by.clamp(min=1)),
    "%": lambda x, by: torch.remainder(x, by.clamp(min=1)),
    "<<": lambda x, by: _shifted(torch.bitwise_left_shift, x, by, torch.zeros_like),
    ">>": lambda x, by: _shifted(torch.bitwise_right_shift, x, by, lambda x: x >> 31),
    "&": torch.bitwise_and,
    "|": torch.bitwise_or,
    "^": torch.bitwise_xor,
    "min": torch.minimum,
    "max": torch.maximum,
    "<": torch.lt,
    "<=": torch.le,
    "==": torch.eq,
    "!=": torch.ne,
    "select": torch.where,
}


class Nodes:
    """What nodes are for variables by name, which are tensors of four axes or none: `found` is what
    `described` says of the programs, `arrays` and `scalars` what they read, by name."""

    def __init__(self, found, arrays, scalars, variables):
        self.found, self.arrays, self.scalars = found, arrays, scalars
        self.variables, self.device = variables, variables["q"].device
        self.known = {}

    def value(self, at):
        """That of a node, of four axes or none."""
        if at not in self.known:
            operation, operands = self.found["nodes"][at]
            self.known[at] = self._computed(operation, operands)
        return self.known[at]

    def _computed(self, operation, operands):
        if operation == "variable":
            return self.variables[operands[0]]
        if operation in ("constant", "scalar", "float"):
            number = self.scalars[operands[0]] if operation == "scalar" else operands[0]
            number = float(number) if operation == "float" else number
            dtype = {bool: torch.bool, int: _INT, float: FLOAT}[type(number)]
            return torch.full((), number, dtype=dtype, device=self.device)
        if operation == "load":
            return self._element(*self.place(operands))
        return _OPERATIONS[operation](*map(self.value, operands))

    def place(self, operands):
        """(the name of the array of a load, its indices, of which that of bits counts bits)."""
        name, *indices = operands
        sizes = list(self.arrays[name].shape)
        if self.found["elements"][name] == "bits":
            sizes[-1] *= 32
        return name, [self.value(at).long().clamp(0, size - 1) for at, size in zip(indices, sizes)]

    def _element(self, name, indices):
        array, element = self.arrays[name], self.found["elements"][name]
        if element == "bits":
            *outer, bit = indices
            return (array[(*outer, bit // 32)] >> (bit % 32)) & 1 == 1
        found = array[tuple(indices)]
        if element == "bool":
            return found != 0
        return found.to(_INT if element in ("i32", "u8") else FLOAT)
