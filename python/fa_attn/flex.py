"""The functions of torch.nn.attention.flex_attention, with its signatures, layouts and rules: tensors are
(batch, heads, seqlen, head_dim), and masks and scores see raw indices, which nothing aligns.

A mask is a program, in which kernels find their empty tiles by themselves: `create_block_mask` evaluates
nothing and takes no memory. Torch's own BlockMask is taken as well, with the blocks that it lists.
"""

from __future__ import annotations

import math
from functools import reduce
from operator import and_, or_
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple, Union

import torch

from . import _torch_composed as composed
from ._blocks import FULL, PARTIAL, block_size, check_cover, states_of, states_of_rows, tiles_of, with_blocks
from ._checks import count, flag, number
from ._core import InputError, InputTypeError, UnsupportedError
from ._modifications import Extents, Modifications, modifications, of_program
from ._programs import Program, takes
from ._torch_by_heads import attention_by_heads, rows_of_heads
from ._torch_programs import leave_out_of_graphs
from ._torch_sdpa import scaled_dot_product_attention

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexKernelOptions",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
    "scaled_dot_product_attention",
    "triangle_attention",
]


leave_out_of_graphs()


# What `kernel_options` are, as torch's: none has an effect.
FlexKernelOptions = Dict[str, Any]


class AuxRequest(NamedTuple):
    """What a call is asked for besides out, as torch's."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """What a call gives besides out, as torch's."""

    lse: Optional[torch.Tensor] = None
    max_scores: Optional[torch.Tensor] = None


def noop_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Every query sees every key."""
    return kv_idx >= 0


def create_mask(
    mod_fn: Callable[..., Any],
    B: Optional[int],
    H: Optional[int],
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
) -> torch.Tensor:
    """The keys that a mask or score function shows, dense: bool (B or 1, H or 1, Q_LEN, KV_LEN)."""
    lengths = (count("Q_LEN", Q_LEN), count("KV_LEN", KV_LEN))
    sizes = (1 if B is None else count("B", B), 1 if H is None else count("H", H), *lengths)
    device = torch.get_default_device() if device is None else device
    mask = mod_fn
    if takes(mod_fn, 5):

        def mask(*indices):
            return mod_fn(torch.zeros((), device=device), *indices) != -math.inf

    for axis in reversed(range(4)):
        mask = torch.vmap(mask, in_dims=tuple(0 if at == axis else None for at in range(4)))
    with torch.no_grad():
        return mask(*(torch.arange(size, device=device) for size in sizes)).bool()


def and_masks(*masks: Callable[..., Any]) -> Callable[..., Any]:
    """The keys that all of these show."""
    return _combined(and_, masks, noop_mask)


def or_masks(*masks: Callable[..., Any]) -> Callable[..., Any]:
    """The keys that one of these shows."""
    return _combined(or_, masks, lambda b, h, q_idx, kv_idx: kv_idx < 0)


def _combined(operation, masks, neutral):
    def mask(b, h, q_idx, kv_idx):
        seen = [one(b, h, q_idx, kv_idx) for one in masks] or [neutral(b, h, q_idx, kv_idx)]
        return reduce(operation, seen)

    return mask


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
        lists = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        made = self._of_states(states_of(*lists), seq_lengths, block_size(BLOCK_SIZE), mask_mod)
        self.__dict__.update(made.__dict__)
        self._by_keys = q_num_blocks is not None

    @classmethod
    def _of(cls, program, batch, heads, seq_lengths, block_size, mask_mod, states=None):
        """A mask of its parts: `program` None where mask_mod is to be set."""
        self = cls.__new__(cls)
        self._program, self._mask_mod, self.states = program, mask_mod, states
        # Whether it has lists by blocks of keys, which say the same again.
        self._by_keys = True
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
        return BlockMask._of_states(states, lengths, self.BLOCK_SIZE, self.mask_mod)

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
        if by_keys and not self._by_keys:
            return None, None
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
        made = BlockMask._of(None, batch, heads, self.seq_lengths, self.BLOCK_SIZE, None, states)
        made._part, made._by_keys = (self, found), self._by_keys
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
        states = states_of(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        made = cls._of_states(states, seq_lengths, block_size(BLOCK_SIZE), mask_mod)
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
    def _of_states(cls, states, seq_lengths, block, mask_mod):
        if seq_lengths is None:
            seq_lengths = (states.shape[2] * block[0], states.shape[3] * block[1])
        check_cover(states, block, seq_lengths)
        program = with_blocks(states, block, mask_mod, tuple(seq_lengths))
        return cls._of(program, states.shape[0], states.shape[1], tuple(seq_lengths), block, mask_mod, states)

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
        made = BlockMask._of(moved, *sizes, self.mask_mod, states)
        made._by_keys = self._by_keys
        return made

    def __repr__(self):
        text = "mask_mod to be set" if self._program is None else repr(self._program.text)
        return f"BlockMask(shape={self.shape}, {text})"

    def __str__(self):
        if self._program is None:
            return repr(self)
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%,\n{self.to_string()})"


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


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: Optional[int],
    H: Optional[int],
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: Union[int, Tuple[int, int]] = 128,
    _compile: bool = False,
) -> BlockMask:
    """The mask of a function (b, h, q_idx, kv_idx), for `flex_attention`. The function is traced once;
    nothing of size Q_LEN x KV_LEN is computed. `BLOCK_SIZE` is that of `to_dense` and the like: kernels have
    tiles of their own.

    >>> mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 1024, 1024)
    """
    flag("_compile", _compile)
    lengths = (count("Q_LEN", Q_LEN), count("KV_LEN", KV_LEN))
    B = None if B is None else count("B", B)
    H = None if H is None else count("H", H)
    program = Program.of_mask(mask_mod, device, (B, H, *lengths))
    return BlockMask._of(program, B, H, lengths, block_size(BLOCK_SIZE), mask_mod)


# The blocks of the mask that torch makes where a call has none, of any lengths.
_ANY_LENGTHS = (1 << 30, 1 << 30)


def _own_mask(block_mask, extents):
    """A `BlockMask` of ours, checked to be of these lengths."""
    if not isinstance(block_mask, BlockMask):
        if not hasattr(block_mask, "kv_indices") or not hasattr(block_mask, "mask_mod"):
            raise InputTypeError(f"block_mask is {type(block_mask).__name__}: make it by create_block_mask")
        lists = (block_mask.kv_num_blocks, block_mask.kv_indices)
        lists += (block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        lengths = tuple(getattr(block_mask, "seq_lengths", (extents.rows, extents.keys)))
        block = block_size(tuple(block_mask.BLOCK_SIZE))
        block_mask = BlockMask._of_states(states_of(*lists), lengths, block, block_mask.mask_mod)
    if block_mask.BLOCK_SIZE == _ANY_LENGTHS:
        return block_mask
    if block_mask.seq_lengths != (extents.rows, extents.keys):
        raise InputError(
            f"block_mask is of {block_mask.seq_lengths} queries and keys, and the call of "
            f"{(extents.rows, extents.keys)}: make one for these lengths"
        )
    for name, have, need in (("B", block_mask.batch, extents.batch), ("H", block_mask.heads, extents.heads)):
        if have not in (None, 1, need):
            raise InputError(f"block_mask has {name} = {have}, and the call {need}: 1, None or {need} fit")
    return block_mask


# What flex_attention's callers set for its own kernels, and why it is not needed.
_NO_EFFECT = (
    "BACKEND BLOCK_M BLOCK_N BLOCK_M1 BLOCK_N1 BLOCK_M2 BLOCK_N2 BLOCKS_ARE_CONTIGUOUS "
    "FORCE_USE_FLEX_ATTENTION "
    "PRESCALE_QK ROWS_GUARANTEED_SAFE USE_TMA WRITE_DQ OUTPUT_LOGSUMEXP OUTPUT_MAX num_warps num_stages "
    "fwd_num_warps fwd_num_stages bwd_num_warps bwd_num_stages kpack matrix_instr_nonkdim waves_per_eu"
).split()


def _check_kernel_options(options):
    for name in options or {}:
        bare = name[4:] if name.startswith(("fwd_", "bwd_")) else name
        if name not in _NO_EFFECT and bare not in _NO_EFFECT:
            raise UnsupportedError(
                f"kernel_options has {name!r}: kernels are the planner's choice, these are known and have no "
                f"effect: {', '.join(_NO_EFFECT)}"
            )


# Within `fa_attn.distributed.context_parallel` what computes calls, whose keys are those of all ranks.
over_ranks: list = []


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Optional[Callable[..., Any]] = None,
    block_mask: Any = None,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Optional[dict] = None,
    *,
    return_aux: Optional[Any] = None,
) -> Any:
    """Torch's flex_attention: query (B, Hq, L, E), key (B, Hkv, S, E), value (B, Hkv, S, Ev); out is (B, Hq,
    L, Ev). A batch of 1 of key and value is shared.

    `score_mod` (score, b, h, q_idx, kv_idx): what a scaled score becomes, `block_mask`: what
    `create_block_mask` of this module or of torch makes. Tensors that functions read have gradients. A query
    that sees no key gives 0, with an LSE of -inf. `return_lse`, or `return_aux` with lse: the natural
    logarithm, float32 (B, Hq, L). `max_scores`: the largest score of each query, float32 (B, Hq, L), to 2e-4
    and its rounding, by a second forward; without a gradient.
    float64 is computed by torch's operations, with all scores in memory and derivatives of every order.
    """
    _check_kernel_options(kernel_options)
    q, k, v = rows_of_heads(query, key, value, flag("enable_gqa", enable_gqa))
    extents = Extents(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    wants_lse = flag("return_lse", return_lse)
    if wants_lse and return_aux is not None:
        raise InputError(
            "return_lse and return_aux: ask for the LSE by return_aux=AuxRequest(lse=True) alone"
        )
    wants_most = return_aux is not None and getattr(return_aux, "max_scores", False)
    if over_ranks:
        if wants_most:
            raise UnsupportedError("max_scores over several ranks: ask for the LSE, or use one GPU")
        out, lse = over_ranks[-1](q, k, v, score_mod, block_mask, number("scale", scale))
        return _returned(out, lse, None, wants_lse, return_aux)
    own_mask = None if block_mask is None else _own_mask(block_mask, extents)
    if composed.is_composed(query, key, value):
        visible = None if own_mask is None else composed.of_blocks(own_mask, extents, query.device)
        key, value = k.transpose(1, 2), v.transpose(1, 2)
        change, scale = composed.by_function(score_mod), number("scale", scale)
        out, lse, most = composed.attention(query, key, value, scale, change, visible)
    else:
        mods = None if own_mask is None else of_program(own_mask.program)
        if score_mod is not None:
            own = modifications(q, extents, score_mod=score_mod)
            mods = own if mods is None else mods.joined(own)
        asks_lse = wants_lse or return_aux is not None
        out, lse = attention_by_heads(q, k, v, mods, scale, wants_lse=asks_lse)
        most = _max_scores(q, k, v, mods, scale) if wants_most else None
    return _returned(out, lse, most if wants_most else None, wants_lse, return_aux)


def _returned(out, lse, most, wants_lse, return_aux):
    """What a call returns, by what it asks for."""
    if return_aux is not None:
        kind = type(return_aux).__name__
        made = lse if getattr(return_aux, "lse", False) else None
        return out, (AuxOutput(made, most) if kind == "AuxRequest" else made)
    return (out, lse) if wants_lse else out


# log(n) of n equal scores, divided by it, is below the scores' own noise in 16 bits; exponents of scores up
# to 2e4 stay within what kernels subtract exactly.
_SHARPNESS = 65536.0
_SHARPER = f"score = s * {_SHARPNESS};"


def _max_scores(q, k, v, mods, scale):
    """The largest scores of queries: the LSE of scores so large that one alone counts."""
    sharper = Modifications((_SHARPER,))
    mods = sharper if mods is None else mods.joined(sharper)
    with torch.no_grad():
        return attention_by_heads(q.detach(), k.detach(), v.detach(), mods, scale)[1] / _SHARPNESS


def triangle_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: Optional[torch.Tensor] = None,
    scale: Optional[float] = None,
    return_aux: bool = False,
) -> Any:
    """Triangle attention with cuEquivariance's shapes: q, k and v (B, N, H, S, D), `bias` (B, 1, H, Q, K),
    shared by the N rows, `mask` (B, N, 1, 1, K), True where a key is seen.

    `bias` has a gradient. A row without keys gives 0, where cuEquivariance gives the mean of v. Returns out
    (B, N, H, Q, D); with `return_aux` (out, lse, None), LSE (B, N, H, Q, 1): there is no maximum.
    """
    if any(x.dim() == 4 for x in (q, k, v)):
        q, k, v = (x[None] if x.dim() == 4 else x for x in (q, k, v))
        bias = bias if bias.dim() == 5 else bias[None]
        mask = mask if mask is None or mask.dim() == 5 else mask[None]
        made = triangle_attention(q, k, v, bias, mask, scale, return_aux)
        return tuple(x if x is None else x[0] for x in made) if return_aux else made[0]
    for name, x in (("q", q), ("k", k), ("v", v), ("bias", bias)):
        if x.dim() != 5:
            raise InputError(f"{name} has the shape {tuple(x.shape)}: it must be (B, N, H, rows, columns)")
    batch, rows, heads, queries = q.shape[:4]
    extents = (batch, 1, heads, queries, k.shape[3])
    if tuple(bias.shape) != extents:
        raise InputError(f"bias has the shape {tuple(bias.shape)}: it must be {extents}")
    if mask is not None and tuple(mask.shape) != (batch, rows, 1, 1, k.shape[3]):
        need = (batch, rows, 1, 1, k.shape[3])
        raise InputError(f"mask has the shape {tuple(mask.shape)}: it must be {need}")
    made = []
    for at in range(batch):
        own_q, own_k, own_v = (x[at].transpose(1, 2) for x in (q, k, v))
        own = Extents(rows, heads, queries, k.shape[3])
        mods = modifications(own_q, own, bias=bias[at], mask=None if mask is None else mask[at].bool())
        made.append(attention_by_heads(own_q, own_k, own_v, mods, scale))
    out, lse = (x[0][None] if batch == 1 else torch.stack(x) for x in zip(*made))
    return (out, lse[..., None], None) if flag("return_aux", return_aux) else out
