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
from ._block_masks import BlockMask
from ._blocks import block_size
from ._checks import count, flag, number
from ._core import InputError, InputTypeError, UnsupportedError
from ._modifications import Extents, Modifications, modifications, of_program
from ._programs import Program, takes
from ._torch_by_heads import attention_by_heads, rows_of_heads
from ._torch_programs import leave_out_of_graphs
from ._torch_sdpa import scaled_dot_product_attention
from ._torch_varlen import varlen_attn

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
    "varlen_attn",
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
        block_mask = BlockMask._of_lists(lists, lengths, block, block_mask.mask_mod)
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
    "num_consumer_groups num_buffers_warp_spec kpack "
    "matrix_instr_nonkdim waves_per_eu SPLIT_KV FLOAT32_PRECISION"
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
    if not key.dtype is value.dtype is query.dtype:
        key, value = _of_the_querys_type(query, key, value)
        q, k, v = rows_of_heads(query, key, value, enable_gqa)
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
    out = _lying_as(query, out)
    return _returned(out, lse, most if wants_most else None, wants_lse, return_aux)


_BESIDE_CODES = (torch.float16, torch.bfloat16)


def _of_the_querys_type(query, *others):
    """Keys and values of other floating types in query's, in which torch multiplies them; codes that kernels
    read beside 16 bits stay."""
    is_read = all(x.dtype is torch.float8_e4m3fn for x in others) and query.dtype in _BESIDE_CODES
    if is_read or not all(x.is_floating_point() for x in (query, *others)):
        return others
    return tuple(x.to(query.dtype) for x in others)


def _lying_as(query, out):
    """`out` with its axes in query's order in memory, as torch's: it has it where sequences lie one after
    another."""
    batch, heads, rows, columns = query.stride()
    if batch >= max(heads, rows) or columns != 1 or query.shape[0] == 1 or not min(heads, rows, batch):
        return out
    order = sorted(range(4), key=query.stride, reverse=True)
    return out.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])


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
