"""Masks of flex_attention, with torch's constructors and attributes: a program, in which kernels find their
empty tiles by themselves, or lists of blocks."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional, Tuple, Union

import torch

from ._blocks import FULL, PARTIAL, block_size, check_cover, states_of, states_of_rows, tiles_of, with_blocks
from ._checks import count, flag
from ._core import InputError
from ._programs import Program


class BlockMask:
    """A mask for `flex_attention`: `mask_mod` over (B, H, *seq_lengths), B and H None for any.

    Made by `create_block_mask` nothing is listed: kernels find the empty tiles of the program. Of lists,
    those of `from_kv_blocks` or of torch's constructor, exactly the blocks that are listed are seen; those by
    keys say the same again and are not read.
    """

    # Of lists, 0 for a block without keys, 1 for one where mask_mod says, 2 for one with all keys, uint8 (B
    # or 1, H or 1, blocks of queries, blocks of keys).
    states: Optional[torch.Tensor]

    def __init__(
        self,
        seq_lengths: Tuple[int, int],
        kv_num_blocks: torch.Tensor,
        kv_indices: torch.Tensor,
        full_kv_num_blocks: Optional[torch.Tensor] = None,
        full_kv_indices: Optional[torch.Tensor] = None,
        q_num_blocks: Optional[torch.Tensor] = None,
        q_indices: Optional[torch.Tensor] = None,
        full_q_num_blocks: Optional[torch.Tensor] = None,
        full_q_indices: Optional[torch.Tensor] = None,
        BLOCK_SIZE: Union[int, Tuple[int, int]] = 128,
        mask_mod: Optional[Callable[..., Any]] = None,
    ):
        for name, counts, indices in (
            ("q", q_num_blocks, q_indices),
            ("full_q", full_q_num_blocks, full_q_indices),
        ):
            if (counts is None) != (indices is None):
                raise InputError(f"{name}_num_blocks and {name}_indices: give both or neither")
        lists = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        made = self._of_lists(lists, seq_lengths, block_size(BLOCK_SIZE), mask_mod)
        self.__dict__.update(made.__dict__)
        self._by_keys = q_num_blocks is not None

    @classmethod
    def _of(cls, program, batch, heads, seq_lengths, block_size, mask_mod, states=None, like=None):
        """A mask of its parts: `program` None where mask_mod is to be set. `like`: one whose lists it has."""
        self = cls.__new__(cls)
        self._program, self._mask_mod, self.states = program, mask_mod, states
        # Whether it has lists by blocks of keys, which say the same again, and lists of full blocks.
        self._by_keys, self._by_full = (True, True) if like is None else (like._by_keys, like._by_full)
        # The lists by blocks of queries that it was made of, which it gives back as they are.
        self._given: Tuple[Optional[torch.Tensor], ...] = ()
        # Of a part, the mask that it is of and its sequences, heads and blocks of queries.
        self._part: Optional[Tuple[BlockMask, Any]] = None
        self.batch, self.heads = batch, heads
        self.seq_lengths, self.BLOCK_SIZE = seq_lengths, block_size
        return self

    @property
    def mask_mod(self) -> Any:
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, function: Any) -> None:
        """As a part of a mask, of which a decoding step takes a block of queries, gets that of its rows."""
        if self.states is None:
            extents = (self.batch, self.heads, *self.seq_lengths)
            self._program = Program.of_mask(function, extents=extents)
        else:
            self._program = with_blocks(self.states, self.BLOCK_SIZE, function, self.seq_lengths)
        self._mask_mod = function

    @property
    def program(self) -> Program:
        if self._program is None:
            raise InputError(
                "block_mask is a part of another: set its mask_mod, whose q_idx is that of the part"
            )
        return self._program

    @property
    def shape(self) -> Tuple[int, ...]:
        return (self.batch or 1, self.heads or 1, *self.seq_lengths)

    def numel(self) -> int:
        return math.prod(self.shape)

    def _blocks(self) -> torch.Tensor:
        """The states of blocks: those that are listed, or else those that the program is known to leave."""
        if self.states is not None:
            return self.states
        if self._program is None and self._part is not None:
            whole, (b, h, rows) = self._part
            return whole._blocks()[b][:, h][:, :, rows]
        sizes = (self.batch or 1, self.heads or 1)
        return torch.from_numpy(tiles_of(self.program, sizes, self.seq_lengths, self.BLOCK_SIZE))

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """The same mask for other lengths, those of its lists at most."""
        lengths = (count("new_q_len", new_q_len), count("new_kv_len", new_kv_len))
        if self.states is None:
            program, sizes = self._program, (self.batch, self.heads)
            if program is not None and program.extents is not None:
                program = Program.of_mask(self._mask_mod, extents=(*sizes, *lengths))
            return BlockMask._of(program, *sizes, lengths, self.BLOCK_SIZE, self._mask_mod)
        rows, columns = (-(-length // size) for length, size in zip(lengths, self.BLOCK_SIZE))
        states = self.states[:, :, :rows, :columns]
        return BlockMask._of_states(states, lengths, self.BLOCK_SIZE, self.mask_mod, like=self)

    def to_dense(self) -> torch.Tensor:
        """1 for the blocks that are computed, int32 (B or 1, H or 1, blocks of queries, blocks of keys)."""
        return (self._blocks() != 0).int()

    def sparsity(self) -> float:
        """The percentage of blocks that are not computed."""
        dense = self.to_dense()
        return 100.0 * (1.0 - dense.sum().item() / max(dense.numel(), 1))

    def to_string(self, grid_size: Any = (20, 20), limit: int = 4) -> str:
        """A picture of the first masks: a mark for each block, or for several where there are more than
        `grid_size` rows and columns (-1: as many as there are), dark where all of it is seen."""
        marks = {FULL: "\u2588\u2588", PARTIAL: "\u2591\u2591"}
        most = tuple(grid_size) if isinstance(grid_size, (tuple, list)) else (grid_size, grid_size)
        if len(most) != 2 or any(not isinstance(size, int) or size == 0 or size < -1 for size in most):
            raise InputError(f"grid_size is {grid_size}: rows and columns, -1 for as many as there are")
        blocks, pictures = _merged(self._blocks(), most), []
        for at in range(min(count("limit", limit), blocks.shape[0] * blocks.shape[1])):
            b, h = divmod(at, blocks.shape[1])
            rows = ["".join(marks.get(state, "  ") for state in row) for row in blocks[b, h].tolist()]
            pictures.append("\n".join([f"({b}, {h})", *rows, ""]))
        return "\n".join(pictures)

    def as_tuple(self, flatten: bool = True) -> Tuple[Any, ...]:
        """Lengths, lists of blocks, the block's size and the function, in the order of torch's."""
        lists = [self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices]
        lists += [self.q_num_blocks, self.q_indices, self.full_q_num_blocks, self.full_q_indices]
        if flag("flatten", flatten):
            return (*self.seq_lengths, *lists, *self.BLOCK_SIZE, self.mask_mod)
        return (self.seq_lengths, *lists, self.BLOCK_SIZE, self.mask_mod)

    def _listed(self, state, by_keys=False):
        if (by_keys and not self._by_keys) or (state == FULL and not self._by_full):
            return None, None
        if self._given and not by_keys:
            return self._given[:2] if state == PARTIAL else self._given[2:]
        there = self._blocks() == state
        there = there.mT if by_keys else there
        return there.sum(-1, dtype=torch.int32), there.int().argsort(
            dim=-1, descending=True, stable=True
        ).int()

    kv_num_blocks = property(lambda self: self._listed(PARTIAL)[0])
    kv_indices = property(lambda self: self._listed(PARTIAL)[1])
    full_kv_num_blocks = property(lambda self: self._listed(FULL)[0])
    full_kv_indices = property(lambda self: self._listed(FULL)[1])

    def _leave_out(self, lists):
        if lists is not None:
            raise InputError("the lists by blocks of keys follow from those by blocks of queries: set None")
        self._by_keys = False

    q_num_blocks = property(lambda self: self._listed(PARTIAL, True)[0], _leave_out)
    q_indices = property(lambda self: self._listed(PARTIAL, True)[1], _leave_out)
    full_q_num_blocks = property(lambda self: self._listed(FULL, True)[0], _leave_out)
    full_q_indices = property(lambda self: self._listed(FULL, True)[1], _leave_out)

    def __getitem__(self, index: Any) -> BlockMask:
        """The part of some sequences, heads and blocks of queries, as torch's; `mask_mod` is to be set."""
        index = index if isinstance(index, tuple) else (index,)
        rows = -(-self.seq_lengths[0] // self.BLOCK_SIZE[0])
        if self.states is not None:
            rows = self.states.shape[2]
        elif self._program is None and self._part is not None:
            rows = len(self._part[1][2])
        axes = [range(self.batch or 1), range(self.heads or 1), range(rows)]
        whole = [at for at, one in enumerate(index) if one is Ellipsis]
        if len(index) - len(whole) > len(axes) or len(whole) > 1:
            raise InputError(f"block_mask has {len(index)} indices: B, H and blocks of queries can be given")
        after = whole[0] if whole else len(index)
        rest = (slice(None),) * (len(axes) - len(index) + len(whole))
        index = (*index[:after], *rest, *index[after + len(whole) :])
        found = [_places(axis, at) for axis, at in zip(axes, index)]
        states = None if self.states is None else self.states[found[0]][:, found[1]][:, :, found[2]]
        batch = None if self.batch is None else len(found[0])
        heads = None if self.heads is None else len(found[1])
        made = BlockMask._of(None, batch, heads, self.seq_lengths, self.BLOCK_SIZE, None, states, like=self)
        made._part = (self, found)
        return made

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: torch.Tensor,
        kv_indices: torch.Tensor,
        full_kv_num_blocks: Optional[torch.Tensor] = None,
        full_kv_indices: Optional[torch.Tensor] = None,
        BLOCK_SIZE: Union[int, Tuple[int, int]] = 128,
        mask_mod: Optional[Callable[..., Any]] = None,
        seq_lengths: Optional[Tuple[int, int]] = None,
        compute_q_blocks: bool = True,
    ) -> BlockMask:
        """The mask of lists: for each block of queries the blocks of keys in which `mask_mod` says what is
        seen, and those of which all is."""
        lists = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        made = cls._of_lists(lists, seq_lengths, block_size(BLOCK_SIZE), mask_mod)
        made._by_keys = flag("compute_q_blocks", compute_q_blocks)
        return made

    @classmethod
    def from_csr(
        cls,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        BLOCK_SIZE: Union[int, Tuple[int, int]] = 128,
        mask_mod: Optional[Callable[..., Any]] = None,
        seq_lengths: Optional[Tuple[int, int]] = None,
    ) -> BlockMask:
        """The mask of a compressed list, as FlashInfer's: block of queries i sees the blocks of keys
        `indices[indptr[i] : indptr[i + 1]]`, of them what `mask_mod` says."""
        block = block_size(BLOCK_SIZE)
        columns = None if seq_lengths is None else -(-seq_lengths[1] // block[1])
        return cls._of_states(states_of_rows(indptr, indices, columns), seq_lengths, block, mask_mod)

    @classmethod
    def _of_lists(cls, lists, seq_lengths, block, mask_mod):
        """Of partial and of full blocks, with as many blocks of keys as are listed or have keys."""
        columns = 0 if seq_lengths is None else -(-seq_lengths[1] // block[1])
        made = cls._of_states(states_of(*lists, columns=columns), seq_lengths, block, mask_mod)
        made._by_full, made._given = lists[2] is not None, lists
        return made

    @classmethod
    def _of_states(cls, states, seq_lengths, block, mask_mod, like=None):
        if seq_lengths is None:
            seq_lengths = (states.shape[2] * block[0], states.shape[3] * block[1])
        check_cover(states, block, seq_lengths)
        program, sizes = with_blocks(states, block, mask_mod, tuple(seq_lengths)), states.shape[:2]
        return cls._of(program, *sizes, tuple(seq_lengths), block, mask_mod, states, like)

    def to(self, device: Any) -> BlockMask:
        """The mask of arrays on another device."""
        states = None if self.states is None else self.states.to(device)
        program = self.program
        arrays = {
            name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in program.arrays.items()
        }
        moved = Program(program.text, arrays, program.scalars)
        moved.extents = program.extents
        sizes = (self.batch, self.heads, self.seq_lengths, self.BLOCK_SIZE)
        return BlockMask._of(moved, *sizes, self.mask_mod, states, like=self)

    def __repr__(self):
        text = "mask_mod to be set" if self._program is None else repr(self._program.text)
        return f"BlockMask(shape={self.shape}, {text})"

    def __str__(self):
        if self._program is None:
            return repr(self)
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%, \n{self.to_string()})"


def _places(axis, at):
    """The places of an axis that an index names, as a list."""
    if isinstance(at, slice):
        return list(axis[at])
    places = at.reshape(-1).tolist() if isinstance(at, torch.Tensor) else at
    places = list(places) if isinstance(places, (list, tuple, range)) else [places]
    for place in places:
        if isinstance(place, bool) or not hasattr(place, "__index__"):
            raise InputError(f"block_mask is indexed by {at!r}: integers, slices and lists of integers fit")
        if not -len(axis) <= place < len(axis):
            raise InputError(f"block_mask has {len(axis)} blocks along an axis, and the index is {at}")
    return [place % len(axis) for place in places]


def _merged(blocks, most):
    """States of so many rows and columns at most: where blocks that fall together differ, partial."""
    for axis, size in zip((2, 3), most):
        have = blocks.shape[axis]
        if size == -1 or have <= size:
            continue
        width = -(-have // size)
        parts = blocks.split(width, axis)
        low, high = (
            torch.cat([f(part, axis, True) for part in parts], axis) for f in (torch.amin, torch.amax)
        )
        blocks = torch.where(low == high, low, PARTIAL)
    return blocks
