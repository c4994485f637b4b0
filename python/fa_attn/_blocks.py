"""Lists of blocks: which blocks of keys a block of queries sees in part, and which whole. They become an
array of states that a mask reads: exactly the blocks that are listed are seen, whatever tiles a kernel has."""

from __future__ import annotations

import re
from reprlib import repr as short
from typing import Any, Optional, Tuple

from ._core import InputError, InputTypeError, UnsupportedError, program_tiles
from ._programs import Program, bytes_of

PARTIAL, FULL = 1, 2


def block_size(size: Any) -> Tuple[int, int]:
    pair = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(pair) != 2 or any(not isinstance(x, int) or isinstance(x, bool) or x < 1 for x in pair):
        raise InputError(
            f"BLOCK_SIZE is {size}: it must be a positive number, or two, of queries and of keys"
        )
    return pair


def states_of(
    partial_counts: Any, partial: Any, full_counts: Any = None, full: Any = None, columns: int = 0
) -> Any:
    """What blocks are, uint8 (B or 1, H or 1, blocks of queries, blocks of keys, `columns` at least): 0
    without keys, 1 where a mask says what is seen, 2 with all keys. Entries behind a list's length may hold
    anything; a block in both lists is whole."""
    given = [
        (state, counts, indices)
        for state, counts, indices in ((1, partial_counts, partial), (2, full_counts, full))
    ]
    for state, counts, indices in given:
        name = "partial" if state == PARTIAL else "full"
        if (counts is None) != (indices is None):
            raise InputError(f"the {name} blocks have a list of counts or of indices: give both or neither")
        if counts is not None and (
            len(indices.shape) < 2 or tuple(counts.shape) != tuple(indices.shape[:-1])
        ):
            raise InputError(
                f"the indices of {name} blocks have the shape {tuple(indices.shape)} and the counts "
                f"{tuple(counts.shape)}: a list for each block of queries, and its length"
            )
    given = [one for one in given if one[1] is not None]
    if not given:
        raise InputError("there is no list of blocks: give that of partial or of full blocks")
    shapes = {tuple(indices.shape[:-1]) for _, _, indices in given}
    if len(shapes) > 1:
        raise InputError(
            f"the lists of partial and of full blocks are of {' and '.join(map(str, shapes))} blocks"
        )
    columns = max(columns, *(indices.shape[-1] for _, _, indices in given))
    make = _torch_states if hasattr(given[0][2], "scatter_") else _numpy_states
    states = make(given, columns)
    return states.reshape((1,) * (4 - len(states.shape)) + tuple(states.shape))


def _torch_states(given, columns):
    import torch

    like = given[0][2]
    states = torch.zeros((*like.shape[:-1], columns + 1), dtype=torch.uint8, device=like.device)
    for state, counts, indices in given:
        there = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
        indices = torch.where(there & (indices >= 0) & (indices < columns), indices, columns)
        states.scatter_(-1, indices.long(), state)
    return states[..., :columns]


def _numpy_states(given, columns):
    import numpy as np

    states = np.zeros((*given[0][2].shape[:-1], columns + 1), np.uint8)
    for state, counts, indices in given:
        counts, indices = np.asarray(counts), np.asarray(indices)
        there = np.arange(indices.shape[-1]) < counts[..., None]
        indices = np.where(there & (indices >= 0) & (indices < columns), indices, columns)
        np.put_along_axis(states, indices.astype(np.int64), np.uint8(state), -1)
    return np.ascontiguousarray(states[..., :columns])


def states_of_rows(indptr: Any, indices: Any, columns: Optional[int] = None) -> Any:
    """The states of a compressed list: block of queries i sees the blocks of keys `indices[indptr[i] :
    indptr[i + 1]]`, in part where a mask says so."""
    for name, x in (("indptr", indptr), ("indices", indices)):
        if len(x.shape) != 1:
            raise InputError(f"{name} has the shape {tuple(x.shape)}: it must have one axis")
    starts, listed = [int(x) for x in indptr], [int(x) for x in indices]
    if not starts or starts[0] != 0 or starts[-1] != len(listed) or sorted(starts) != starts:
        raise InputError(
            f"indptr goes from 0 to {len(listed)}, the number of indices, without decreasing: not {starts}"
        )
    columns = max(listed, default=0) + 1 if columns is None else columns
    wrong = [at for at in listed if not 0 <= at < columns]
    if wrong:
        raise InputError(f"indices has the block {wrong[0]}: there are blocks 0 to {columns - 1}")
    import numpy as np

    states = np.zeros((1, 1, len(starts) - 1, columns), np.uint8)
    for row, (first, end) in enumerate(zip(starts, starts[1:])):
        states[0, 0, row, listed[first:end]] = PARTIAL
    if not hasattr(indices, "scatter_"):
        return states
    import torch

    return torch.from_numpy(states).to(indices.device)


def check_cover(states: Any, block: Tuple[int, int], lengths: Tuple[int, int]) -> None:
    covered = (states.shape[2] * block[0], states.shape[3] * block[1])
    if covered[0] < lengths[0] or covered[1] < lengths[1]:
        raise InputError(f"the lists have blocks for {covered} queries and keys, of {tuple(lengths)}")


def indices_of(names: str, shared: Any) -> str:
    """The indices of an array's axes: 0 along those that all sequences, heads or queries share, so that
    kernels look at a mask's tiles and bits once for all of them."""
    return ", ".join("0" if is_shared else name for name, is_shared in zip(names, shared))


def _state(states, rows, keys):
    """The state of a pair's block."""
    places = indices_of("bh", (size == 1 for size in states.shape))
    return f"fa_blocks[{places}, q // {rows}, k // {keys}]"


def with_blocks(states: Any, block: Tuple[int, int], mask_mod: Any = None, lengths: Any = None) -> Program:
    """The program of block states, and of `mask_mod` (a function, a text or a Program) in those that are
    partial."""
    rows, keys = block
    if mask_mod is None or getattr(mask_mod, "__name__", "") == "noop_mask":
        text = f"array fa_blocks: u8[_, _, _, _];\nmask = {_state(states, rows, keys)} != 0;"
        return Program(text, {"fa_blocks": states})
    if isinstance(mask_mod, (str, Program)):
        own = Program.of_mask(mask_mod)
        state = _state(states, rows, keys)
        text = re.sub(
            r"\bmask = (.*);\s*$",
            lambda found: f"mask = {state} == {FULL} or {state} == {PARTIAL} and ({found[1]});",
            own.text,
            flags=re.DOTALL,
        )
        arrays = {"fa_blocks": states, **own.arrays}
        return Program(f"array fa_blocks: u8[_, _, _, _];\n{text}", arrays, own.scalars)
    if not callable(mask_mod):
        raise InputError(f"mask_mod is a function, a text or a Program, not {short(mask_mod)}")

    def mask(b, h, q_idx, kv_idx):
        state = states[b, h, q_idx // rows, kv_idx // keys]
        return (state == FULL) | ((state == PARTIAL) & mask_mod(b, h, q_idx, kv_idx))

    extents = None if lengths is None else (None, None, *lengths)
    return Program.of_mask(mask, getattr(states, "device", None), extents)


def of_tensors(tensors: Any, mask_mod: Any, lengths: Tuple[int, int]) -> Program:
    """The mask of FlashAttention 4's block-sparse tensors, whose fields have their names."""
    named = {
        "mask_block_cnt": None,
        "mask_block_idx": None,
        "full_block_cnt": None,
        "full_block_idx": None,
        "cu_total_m_blocks": None,
        "cu_block_idx_offsets": None,
        "block_size": None,
    }
    for name in named:
        named[name] = tensors.get(name) if isinstance(tensors, dict) else getattr(tensors, name, None)
    if named["mask_block_cnt"] is None and named["full_block_cnt"] is None:
        kind = type(tensors).__name__
        raise InputTypeError(
            f"block_sparse_tensors is {kind}: it must have mask_block_cnt and mask_block_idx"
        )
    for name in ("cu_total_m_blocks", "cu_block_idx_offsets"):
        if named[name] is not None:
            raise UnsupportedError(
                f"block_sparse_tensors has {name}: lists of packed sequences are not read, pad the "
                "sequences or write a mask_mod"
            )
    if named["block_size"] is None:
        raise InputError("block_sparse_tensors has no block_size: give the queries and keys of a block")
    states = states_of(*(named[name] for name in list(named)[:4]))
    block = block_size(tuple(named["block_size"]))
    check_cover(states, block, lengths)
    return with_blocks(states, block, mask_mod, lengths)


def tiles_of(
    program: Program, sizes: Tuple[int, int], lengths: Tuple[int, int], block: Tuple[int, int]
) -> Any:
    """What a program is known to leave of blocks, as `states_of`, of numpy: a block that is called partial
    may turn out to be empty or whole where that follows from more than ranges of values."""
    import numpy as np

    arrays = [bytes_of(program.arrays[one["name"]], one["element"]) for one in program.description["arrays"]]
    scalars = [float(program.scalars[one["name"]]) for one in program.description["scalars"]]
    blocks = tuple(-(-length // size) for length, size in zip(lengths, block))
    found = program_tiles(program.text, arrays, scalars, sizes, lengths, block)
    return np.array(bytearray(found), np.uint8).reshape(*sizes, *blocks)
