"""`flex_attention` over ranks, as in torch's context parallelism: a rank's rows of queries on the keys of all
ranks, under masks of the whole."""

from __future__ import annotations

import inspect

import torch

from ._core import InputError, UnsupportedError
from ._programs import Program
from ._sharded import Dealing, dealt
from ._sharded_peers import place

# The function that torch's _create_cp_block_mask makes of a mask of the whole.
_REWRITTEN = "_create_cp_block_mask.<locals>._rewrite_mask_mod.<locals>.<lambda>"


def flex_over_ranks(attention, group, layout):
    """What `fa_attn.flex.flex_attention` calls instead: `attention` of rows that are dealt in `layout`
    where masks do not say otherwise."""

    def compute(q, k, v, score_mod, block_mask, scale):
        if k.shape[1] != q.shape[1]:
            raise InputError(
                f"query has {q.shape[1]} rows and key {k.shape[1]}: give this rank's rows of both, keys of "
                "all ranks are gathered here"
            )
        world, rows = place(group)[0], q.shape[1]
        own, mods = layout, {}
        if block_mask is not None:
            mask, own = _of_the_whole(block_mask, world, rows, layout)
            sizes = block_mask.shape[:2] if hasattr(block_mask, "shape") else (None, None)
            extents = (*(None if size == 1 else size for size in sizes), world * rows, world * rows)
            mods["mask_mod"] = Program.of_mask(mask, q.device, extents)
        if score_mod is not None:
            mods["score_mod"] = score_mod
        options = dict(softmax_scale=scale, causal=False, group=group, layout=own, return_lse=True)
        out, lse = attention(q, k, v, **options, **mods)
        return out.transpose(1, 2), lse

    return compute


def _of_the_whole(block_mask, world, rows, layout):
    """The mask function of all queries and keys, and how rows are dealt."""
    function = block_mask.mask_mod
    lengths = tuple(int(length) for length in block_mask.seq_lengths)
    if getattr(function, "__qualname__", "") != _REWRITTEN:
        if lengths != (world * rows, world * rows):
            raise InputError(
                f"block_mask is of {lengths} queries and keys: it must be that of the whole sequence, "
                f"{(world * rows, world * rows)}, or what torch's _context_parallel_shard makes of it"
            )
        if getattr(block_mask, "states", None) is not None or not hasattr(block_mask, "program"):
            _refuse_lists(block_mask, function)
        return function, layout
    given = inspect.getclosurevars(function).nonlocals
    indices = inspect.getclosurevars(given["qkv_idx_restore"]).nonlocals["qkv_rearrange_indices"]
    if indices is None:
        return given["mask_mod"], "contiguous"
    for name in ("zigzag", "contiguous"):
        if _is_dealt(indices, name, world):
            return given["mask_mod"], name
    raise UnsupportedError(
        "a load balancer that deals rows neither zigzag nor contiguously: use torch's _HeadTailLoadBalancer "
        "or none, or torch's own plan, which gathers keys, with fa_attn.flex.flex_attention in the module"
    )


def _is_dealt(indices, layout, world):
    """Whether rows in the order of `indices`, (1, rows), are those of the ranks one after the other."""
    if indices.shape[0] != 1 or indices.shape[1] % (world * len(dealt(layout, world)[0])):
        return False
    dealing = Dealing(layout, world, indices.shape[1])
    spans = [torch.arange(first, end) for rank in range(world) for first, end in dealing.spans(rank)]
    return torch.equal(torch.cat(spans), indices[0].cpu())


def _refuse_lists(block_mask, function):
    """Lists of blocks that say more than their function."""
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    if function is None or function is noop_mask or not isinstance(block_mask, BlockMask):
        raise UnsupportedError(
            "a block_mask of lists over several ranks: make it by create_block_mask of a mask_mod, which "
            "ranks can cut"
        )
