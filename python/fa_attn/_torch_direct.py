"""Gradients of arrays that kernels do not sum, as those of tables by distance and of elements that other
arrays name: an array with an element for each place, which torch gathers, stands for each of their loads, and
torch adds up its gradient."""

from __future__ import annotations

import json
from functools import lru_cache

import torch

from . import _core
from ._modifications import extents_of
from ._programs import description_of
from ._torch_memory import FLOAT
from ._torch_nodes import Nodes, described, joined

_INT = torch.int32
_AXES = "bhqk"


@lru_cache(maxsize=4096)
def _replaced(texts):
    """What `Program::with_direct_gradients` makes of a call's programs, what they were, and the names of the
    arrays that are left; None where nothing is replaced."""
    text = joined(texts)
    try:
        made = _core.program_direct(text)
    except _core.InputError:
        # Too many arrays: as kernels refuse the program that it is.
        return None
    if made is None:
        return None
    made = json.loads(made)
    return made, described(text), {array["name"] for array in description_of(made["text"])["arrays"]}


def replaced(texts):
    """The arrays of a call's programs whose gradients torch adds up."""
    found = _replaced(texts)
    return set() if found is None else {load["array"] for load in found[0]["loads"]}


class DirectGradients:
    """A call's programs with gathered arrays (`programs`), and rooms for the gradients that the backward
    writes (`gradients`)."""

    @classmethod
    def of(cls, q, k, options, extras, programs, gradients):
        """None where kernels sum all gradients."""
        found = _replaced(tuple(programs[0]))
        return None if found is None else cls(found, q, k, options, extras, programs, gradients)

    def __init__(self, replaced, q, k, options, extras, programs, gradients):
        made, found, left = replaced
        _, arrays, scalars = programs
        wanted, arrays = dict(gradients), dict(arrays)
        variables = _variables(q, k, options, extras)
        places = _Places(found, arrays, dict(scalars), variables)
        self.loads, kept = [], [one for one in arrays.items() if one[0] in left]
        for load in made["loads"]:
            gather = places.gather(load)
            # In f32, as gradients are summed.
            values = gather.of(arrays[load["array"]]).to(FLOAT)
            kept.append((load["name"], values))
            room = torch.empty(values.shape, dtype=FLOAT, device=q.device)
            self.loads.append((load, gather, room, wanted.get(load["array"])))
        self.programs = ([made["text"]], kept, scalars)
        replaced = {load["array"] for load in made["loads"]}
        own = [one for one in gradients if one[0] in left and one[0] not in replaced]
        # What no program reads that is left has no gradient but of its loads.
        self.unread = [room for name, room in gradients if name not in left and name not in replaced]
        self.gradients = own + [(load["name"], room) for load, _, room, _ in self.loads]

    def add_up(self):
        """Writes the gradients of the arrays that were replaced."""
        for room in {id(room): room for *_, room in self.loads if room is not None}.values():
            room.zero_()
        for room in self.unread:
            room.zero_()
        for _, gather, made, room in self.loads:
            if room is not None:
                gather.add(room, made)


def _variables(q, k, options, extras):
    """The variables of a program, each with the axes (batch, heads, queries, keys) that it follows."""
    extents = extents_of(q, k, extras)
    made = {}
    for at, (name, size) in enumerate(zip(_AXES, extents)):
        shape = [1] * 4
        shape[at] = -1
        made[name] = torch.arange(size, dtype=_INT, device=q.device).view(shape)
    made["hk"] = made["h"] // (q.shape[-2] // k.shape[-2])
    made["sq"] = _lengths(extents.rows, "cu_seqlens_q", "seqused_q", extras, q.device)
    made["sk"] = _lengths(extents.keys, "cu_seqlens_k", "seqused_k", extras, q.device)
    made["off"] = made["sk"] - made["sq"] + (options.query_offset or 0)
    return made


def _lengths(most, starts, used, extras, device):
    """Those of each sequence."""
    starts, used = (None, None) if extras is None else (getattr(extras, starts), getattr(extras, used))
    if used is not None:
        return used.to(_INT).view(-1, 1, 1, 1)
    if starts is not None:
        return starts.diff().to(_INT).view(-1, 1, 1, 1)
    return torch.full((), most, dtype=_INT, device=device)


class _Places(Nodes):
    """What a program's integers are at all places of a call."""

    def gather(self, load):
        """How a load's elements lie in its array."""
        if load["is_by_distance"]:
            rows, keys = self.variables["q"].numel(), self.variables["k"].numel()
            distance = torch.arange(1 - keys, rows, dtype=_INT, device=self.device).view(1, 1, 1, -1)
            along = dict(self.variables, q=distance.clamp(min=0), k=(-distance).clamp(min=0))
            others = _Places(self.found, self.arrays, self.scalars, along)
            own = [name for name in load["axes"] if name != "q"]
            return _ByDistance(others._elements(load["indices"], load["array"], own), rows, keys)
        return self._elements(load["indices"], load["array"], load["axes"])

    def _elements(self, indices, array, axes):
        shape = self.arrays[array].shape
        found = [self._index(at, size) for at, size in zip(indices, shape)]
        # The index of several axes names their diagonal.
        several = [index for index in found if isinstance(index, str) and found.count(index) > 1]
        found = [self._of_tensor(x, size) if x in several else x for x, size in zip(found, shape)]
        # The axes that indices other than plain ones follow: plain ones of the same are theirs.
        own = [x.shape for x in found if isinstance(x, torch.Tensor)]
        own = [name for name, size in zip(_AXES, torch.broadcast_shapes(*own)) if size > 1] if own else []
        for at, index in enumerate(found):
            if isinstance(index, str) and index in own:
                found[at] = self._of_tensor(index, shape[at])
        sizes = {name: self.variables[name].numel() for name in _AXES}
        return _Elements(found, own, axes, sizes)

    def _index(self, at, size):
        """An index of an axis: a number, the name of a variable that it is, or a tensor of four axes."""
        operation, operands = self.found["nodes"][at]
        if size == 1 or operation == "constant":
            return 0 if size == 1 else min(max(operands[0], 0), size - 1)
        if operation == "variable" and operands[0] in _AXES and size >= self.variables[operands[0]].numel():
            return operands[0]
        return self._of_tensor(self.value(at), size)

    def _of_tensor(self, index, size):
        index = self.variables[index] if isinstance(index, str) else index
        return index.long().clamp(0, size - 1).reshape((1,) * (4 - index.dim()) + tuple(index.shape))


class _Elements:
    """The elements of an array at indices: numbers, names of variables, which are those of the first elements
    of an axis, and tensors, which follow the variables of `own`. Their axes are `axes`, of 1 where no index
    follows one."""

    def __init__(self, indices, own, axes, sizes):
        self.indices, self.sizes = indices, sizes
        self.tensors = [x for x in indices if isinstance(x, torch.Tensor)]
        self.names = [x for x in indices if isinstance(x, str)]
        order = self.names + own
        self.order = [order.index(name) for name in axes if name in order]
        self.missing = [at for at, name in enumerate(axes) if name not in order]
        if self.tensors:
            shape = torch.broadcast_shapes(*(x.shape for x in self.tensors))
            shape = [size for size in shape if size > 1]
            self.tensors = [x.reshape(shape) for x in torch.broadcast_tensors(*self.tensors)]

    def _part(self, array):
        """The part of an array whose last axes the tensors index."""
        axis = 0
        for index in self.indices:
            if isinstance(index, int):
                array = array.select(axis, index)
            elif isinstance(index, str):
                array, axis = array.narrow(axis, 0, self.sizes[index]), axis + 1
            else:
                array = array.movedim(axis, -1)
        return array

    def of(self, array):
        part = self._part(array)
        if self.tensors:
            part = torch.ops.aten.index(part, [*[None] * len(self.names), *self.tensors])
        part = part.permute(self.order)
        for at in self.missing:
            part = part.unsqueeze(at)
        # An array of a program has an axis.
        return part if part.dim() else part.reshape(1)

    def add(self, room, made):
        """Adds to the gradient of an array what that of its elements is."""
        if not self.order and not self.missing:
            made = made.reshape(())
        for at in reversed(self.missing):
            made = made.squeeze(at)
        made = made.permute([self.order.index(at) for at in range(len(self.order))])
        part = self._part(room)
        if self.tensors:
            torch.ops.aten.index_put_(part, [*[None] * len(self.names), *self.tensors], made, True)
        else:
            part.add_(made)


class _ByDistance:
    """Elements that follow the distance of the query and the key: gathered once for each distance, the lowest
    first."""

    def __init__(self, elements, rows, keys):
        self.elements, self.rows, self.keys = elements, rows, keys

    def of(self, array):
        # The elements of a row are neighbours, and those of the next row one place before.
        return self.elements.of(array).flip(-1).unfold(-1, self.keys, 1).flip(-2)

    def add(self, room, made):
        # Each row one place behind the one before, so that a distance is a column.
        wide = torch.nn.functional.pad(made.flip(-2), (0, self.rows)).flatten(-2)
        wide = wide[..., : self.rows * (self.keys + self.rows - 1)]
        line = wide.unflatten(-1, (self.rows, self.keys + self.rows - 1)).sum(-2)
        self.elements.add(room, line.flip(-1))
