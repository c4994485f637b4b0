"""FlashInfer's wrappers for attention on the blocks of keys that are listed, of one size or of any."""

from __future__ import annotations

import functools
from typing import Any, Optional, Union

import torch

from ._blocks import FULL, with_blocks
from ._checks import count
from ._core import InputError, UnsupportedError
from ._flashinfer import (
    Results,
    Scores,
    keywords,
    of_codes,
    on_host,
    packed_bits,
    pages_of,
    scores_of,
    starts_of,
)
from ._flashinfer_plans import Plan, descales_of
from ._programs import Program
from .interface import flash_attn_func

Tensor = torch.Tensor

# A causal mask is, as in FlashInfer, one of a block row's listed keys, counted one after another: its last
# row sees all of them.
_CAUSAL = """array place: i32[_, _];
array last: i32[_];
let row = q // {rows};
let at = place[row, k // {keys}];
mask = at >= 0 and at * {keys} + k % {keys} <= last[row] + q % {rows};"""

# The bits of a block row: its queries by its listed keys, from a byte of their own on.
_BITS = """array seen: u8[_];
array start: i32[_];
array width: i32[_];
array place: i32[_, _];
let row = q // {rows};
let at = place[row, k // {keys}];
let bit = (q % {rows}) * width[row] + at * {keys} + k % {keys};
mask = at >= 0 and ((seen[start[row] + (bit >> 3)] >> (bit & 7)) & 1) == 1;"""

_ANY_SIZE = """array seen: u8[_, _, _];
array row: i32[_, _];
array column: i32[_, _];
mask = seen[hk, row[hk, q], column[hk, k]] != 0;"""

_ANY_SIZE_CAUSAL = """array seen: u8[_, _, _];
array row: i32[_, _];
array column: i32[_, _];
array ahead: i32[_, _, _];
array last: i32[_, _];
let i = row[hk, q];
let j = column[hk, k];
mask = seen[hk, i, j] != 0 and ahead[hk, i, j] + k <= last[hk, i] + q;"""


class _Blocks(Plan):
    """What both have in common."""

    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, "NHD", False)

    def _plan(self, causal, encoding, cap, scale, heads, head_dim, types):
        if encoding != "NONE":
            raise UnsupportedError(
                f"pos_encoding_mode is {encoding!r} with blocks: turn q and k before, or leave it out"
            )
        scores = scores_of(causal, -1, cap, scale, encoding, None, None)
        if heads[0] % heads[1]:
            raise InputError(f"num_qo_heads is {heads[0]}: it must be a multiple of num_kv_heads, {heads[1]}")
        self._set(scores, heads, head_dim, types, False)

    def _attention(self, q, k, v, results, descales):
        """Of (rows, heads, head_dim)."""
        self._check(q, k)
        lengths = (q.shape[0], k.shape[0])
        if lengths != self._lengths:
            raise InputError(f"q and k have {lengths} rows: the plan is of {self._lengths}")
        call = keywords(self._scores, q, descales=descales, mask=self._mask)
        room = results.room((*q.shape[:-1], v.shape[-1]), q.dtype)
        room = None if room is None else room[None]
        made, lse = flash_attn_func(q[None], k[None], v[None], return_softmax_lse=True, out=room, **call)
        return results.of(made[0], lse[0])

    def _old(self, _, scores):
        cap, scale, encoding = scores
        if encoding != "NONE":
            raise UnsupportedError(f"pos_encoding_mode is {encoding!r} with blocks: leave it out")
        self._scores = Scores(self._scores.causal, -1, cap or 0.0, scale)


class BlockSparseAttentionWrapper(_Blocks):
    """Attention of M queries on N keys, in blocks of R by C that are listed, as scipy's bsr_matrix."""

    def plan(
        self,
        indptr: Optional[Tensor],
        indices: Optional[Tensor],
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Optional[Tensor] = None,
        packed_mask: Optional[Tensor] = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        q_data_type: Union[str, torch.dtype] = "float16",
        kv_data_type: Optional[Union[str, torch.dtype]] = None,
        o_data_type: Union[str, torch.dtype] = "float16",
        non_blocking: bool = True,
        block_mask: Optional[Tensor] = None,
    ) -> None:
        """Sets the blocks and scores of the runs that follow: rows of blocks see the blocks of keys
        `indices[indptr[i] : indptr[i + 1]]`, or with `block_mask` (heads, rows, columns of blocks), of query
        or K/V heads, those where it is True. `mask`: what is seen within the listed blocks (blocks, R, C);
        `packed_mask`: its bits as `segment_packbits` gives them, of each row of blocks (R, listed keys).
        `causal` counts the listed keys of a row of blocks one after another, as FlashInfer does."""
        M, N, R, C = (count(name, x, 1) for name, x in (("M", M), ("N", N), ("R", R), ("C", C)))
        if N % C:
            raise InputError(f"N is {N}: it must be a multiple of C, {C}")
        types = (q_data_type, kv_data_type, o_data_type)
        has_mask = mask is not None or packed_mask is not None
        causal = causal and not has_mask
        heads = (num_qo_heads, num_kv_heads)
        self._plan(causal, pos_encoding_mode, logits_soft_cap, sm_scale, heads, head_dim, types)
        self._lengths, rows, columns = (M, N), -(-M // R), N // C
        if block_mask is not None:
            if causal or has_mask:
                raise UnsupportedError("block_mask with causal or mask: lists of blocks take these")
            states = self._states(block_mask, rows, columns)
            self._mask = with_blocks(states, (R, C))
            return
        if indptr is None or indices is None:
            raise InputError("indptr and indices are missing: give both, or block_mask")
        host = starts_of("indptr", indptr, pages_of("indices", indices).shape[0])
        if host.shape[0] != rows + 1:
            raise InputError(
                f"indptr has {host.shape[0]} elements: {M} rows in blocks of {R} have {rows + 1}"
            )
        listed, counts = on_host("indices", indices), host.diff()
        if listed.numel() and not 0 <= int(listed.min()) <= int(listed.max()) < columns:
            raise InputError(f"indices names a block that is none: there are blocks 0 to {columns - 1}")
        row = torch.repeat_interleave(counts)
        place = torch.full((rows, columns), -1, dtype=torch.int32)
        order = torch.arange(listed.numel()) - host[:-1][row]
        place[row, listed] = order.int()
        if int((place >= 0).sum()) != listed.numel():
            raise InputError("indices names a block of a row twice: each once")
        sizes = torch.full((rows,), R)
        sizes[-1] = M - (rows - 1) * R
        if has_mask:
            self._mask = self._bits(mask, packed_mask, place, (row, order), (counts, sizes), (R, C))
        elif causal:
            last = (counts * C - sizes).int()
            arrays = {"place": place.to(self.device), "last": last.to(self.device)}
            self._mask = Program(_CAUSAL.format(rows=R, keys=C), arrays)
        else:
            states = ((place >= 0) * FULL).to(torch.uint8)
            self._mask = with_blocks(states[None, None].to(self.device), (R, C))

    begin_forward = plan

    def _states(self, block_mask, rows, columns):
        heads = block_mask.shape[0]
        if tuple(block_mask.shape[1:]) != (rows, columns) or heads not in self._heads:
            need = f"({self._heads[0]} or {self._heads[1]}, {rows}, {columns})"
            raise InputError(f"block_mask has the shape {tuple(block_mask.shape)}: it must be {need}")
        states = block_mask.to(self.device).bool() * FULL
        return states.to(torch.uint8).repeat_interleave(self._heads[0] // heads, 0)[None]

    def _bits(self, mask, packed, place, of_blocks, sizes, block):
        """The program of what is seen within blocks."""
        (row, order), (counts, rows), (R, C) = of_blocks, sizes, block
        width = counts * C
        starts = torch.nn.functional.pad(((rows * width + 7) // 8).cumsum(0), (1, 0))
        if packed is None:
            if tuple(mask.shape) != (row.numel(), R, C):
                have = tuple(mask.shape)
                raise InputError(f"mask has the shape {have}: it must be ({row.numel()}, {R}, {C})")
            room = torch.zeros(8 * int(starts[-1]) + 1, dtype=torch.bool)
            at = (
                torch.arange(R)[:, None] * width[row, None, None] + order[:, None, None] * C + torch.arange(C)
            )
            # Rows behind the last query have no bits.
            is_row = (torch.arange(R)[:, None] < rows[row, None, None]).expand_as(at)
            at = torch.where(is_row, 8 * starts[row, None, None] + at, room.numel() - 1)
            room[at] = mask.to("cpu").bool()
            packed = packed_bits(room[:-1], "little")
        elif packed.numel() < int(starts[-1]):
            raise InputError(f"packed_mask has {packed.numel()} bytes: the blocks ask for {int(starts[-1])}")
        if int((8 * starts[-1]).item()) >= 2**31:
            raise UnsupportedError("masks within blocks of 2^31 bits and more: they are read by 32 bits")
        arrays = {
            "seen": packed.reshape(-1) if packed.numel() else packed.new_zeros(1),
            "start": starts[:-1].int(),
            "width": width.int(),
            "place": place,
        }
        arrays = {name: x.to(self.device) for name, x in arrays.items()}
        return Program(_BITS.format(rows=R, keys=C), arrays)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Optional[Tensor] = None,
        scale_k: Optional[Tensor] = None,
        scale_v: Optional[Tensor] = None,
        out: Optional[Tensor] = None,
        lse: Optional[Tensor] = None,
        return_lse: bool = False,
        enable_pdl: Optional[bool] = None,
    ) -> Any:
        """out (M, heads_q, head_dim), with `return_lse` (out, lse); q (M, heads_q, head_dim), k and v (N,
        heads_kv, head_dim). `scale_q`, ..: factors of the heads of codes."""
        results = Results(self._types[2], None, out, lse, return_lse)
        self._check(q, k)
        if scale_q is not None:
            q = of_codes(q, scale_q)
            self_types = self._types
            self._types = (q.dtype, *self_types[1:])
            try:
                return self._attention(q, k, v, results, descales_of(scale_k, scale_v))
            finally:
                self._types = self_types
        return self._attention(q, k, v, results, descales_of(scale_k, scale_v))

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Optional[Tensor] = None,
        scale_k: Optional[Tensor] = None,
        scale_v: Optional[Tensor] = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
    ) -> Any:
        """`run`, as older programs call it: scores are made of these arguments instead of the plan's."""
        self._old(None, (logits_soft_cap, sm_scale, pos_encoding_mode))
        return self.run(q, k, v, scale_q, scale_k, scale_v)


class VariableBlockSparseAttentionWrapper(_Blocks):
    """Attention on blocks of any sizes, of each K/V head its own."""

    def plan(
        self,
        block_mask_map: Tensor,
        block_row_sz: Tensor,
        block_col_sz: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        non_blocking: bool = True,
        q_data_type: Union[str, torch.dtype] = "float16",
        kv_data_type: Optional[Union[str, torch.dtype]] = None,
    ) -> None:
        """Sets the blocks and scores of the runs that follow: `block_mask_map` (heads_kv, rows, columns of
        blocks), whose sizes are `block_row_sz` (heads_kv, rows) and `block_col_sz` (heads_kv, columns).
        `causal` counts the listed keys of a row of blocks one after another, as FlashInfer does."""
        heads, types = (num_qo_heads, num_kv_heads), (q_data_type, kv_data_type, q_data_type)
        self._plan(causal, pos_encoding_mode, logits_soft_cap, sm_scale, heads, head_dim, types)
        given = {"block_row_sz": block_row_sz, "block_col_sz": block_col_sz}
        sizes = [on_host(name, x) for name, x in given.items()]
        need = (num_kv_heads, *(x.shape[-1] for x in sizes))
        if tuple(block_mask_map.shape) != need or any(x.shape[0] != num_kv_heads for x in sizes):
            have = [tuple(x.shape) for x in (block_mask_map, *sizes)]
            raise InputError(f"blocks and their sizes have the shapes {have}: they must be of {need}")
        lengths = []
        for name, x in zip(given, sizes):
            sums = x.sum(1)
            if (x < 0).any() or (sums != sums[0]).any():
                raise InputError(f"{name} sums to {sums.tolist()}: all heads have as many rows")
            lengths.append(int(sums[0]))
        self._lengths = tuple(lengths)
        row, column = (torch.stack([torch.repeat_interleave(own) for own in x]).int() for x in sizes)
        seen = on_host("block_mask_map", block_mask_map) != 0
        arrays = {"seen": seen.to(torch.uint8), "row": row, "column": column}
        if causal:
            listed = seen * sizes[1][:, None]
            first = [x.cumsum(-1) - x for x in sizes]
            arrays["ahead"] = (listed.cumsum(-1) - listed - first[1][:, None]).int()
            arrays["last"] = (listed.sum(-1) - sizes[0] - first[0]).int()
        arrays = {name: x.contiguous().to(self.device) for name, x in arrays.items()}
        self._mask = Program(_ANY_SIZE_CAUSAL if causal else _ANY_SIZE, arrays)

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Optional[Tensor] = None,
        lse: Optional[Tensor] = None,
        return_lse: bool = False,
        enable_pdl: Optional[bool] = None,
    ) -> Any:
        """out (heads_q, rows, head_dim), with `return_lse` (out, lse), lse (heads_q, rows); q (heads_q, rows,
        head_dim), k and v (heads_kv, keys, head_dim)."""
        rows = [x.transpose(0, 1) for x in (q, k, v)]
        room = [None if x is None else x.transpose(0, 1) for x in (out, lse)]
        made = self._attention(*rows, Results(self._types[2], None, *room, return_lse), {})
        own, own_lse = made if return_lse else (made, None)
        own = out if out is not None else own.transpose(0, 1).contiguous()
        if not return_lse:
            return own
        return own, lse if lse is not None else own_lse.transpose(0, 1).contiguous()

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
    ) -> Any:
        """`run`, as older programs call it: scores are made of these arguments instead of the plan's."""
        self._old(None, (logits_soft_cap, sm_scale, pos_encoding_mode))
        return self.run(q, k, v)
