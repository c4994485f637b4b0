"""How the operators' work is divided where tensors are torch's DTensors: by heads, or by the sequences of a
batch. Each rank computes its own; tensors that are placed otherwise are redistributed, but for caches that
are written in place."""

from __future__ import annotations

import sys

import torch

from ._core import InputTypeError, UnsupportedError
from ._options import DESCALES

HEADS, BATCH, WHOLE = "heads", "batch", "whole"

# What the operators' tensors are, by their names in the schemas.
_ROWS = ("q", "k", "v", "out", "dout", "k_cache", "v_cache")
_PER_SEQUENCE = ("seqused_q", "seqused_k", "page_table")
_OUTPUTS = {
    "fa_attn::forward": ("out", "lse"),
    "fa_attn::backward": ("q", "k", "v", "dsinks"),
    "fa_attn::append": ("rotated", "seqused_k"),
}

_is_told = False


def tell_shardings():
    """Registers the shardings, where DTensor has been imported."""
    global _is_told
    if not _is_told and "torch.distributed.tensor" in sys.modules:
        _is_told = True
        for operator in (torch.ops.fa_attn.forward, torch.ops.fa_attn.backward, torch.ops.fa_attn.append):
            _register(operator.default)


# Called by torch.compile where it traces, not traced: torch.compiler.assume_constant_result does this, and
# imports all of the compiler.
tell_shardings._dynamo_marked_constant = True


def _register(operator):
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    names = [argument.name for argument in operator._schema.arguments]

    def shardings(*arguments):
        given = dict(zip(names, arguments))
        return [_sharding(operator.name(), given, way) for way in _ways(given)]

    register_sharding(operator)(shardings)
    # A mesh may have several axes. Which of them divide the heads is known for all of them together.
    known = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    expand = known[operator]

    def strategies(schema):
        found = expand(schema)
        tensors = dict(zip(names, schema.args_schema))
        given = [name for name in names if hasattr(tensors.get(name), "strategies")]
        given_specs = {name: tensors[name].strategies[0].output_spec for name in given}
        found.strategies = [
            each for each in found.strategies if _is_right(given_specs, dict(zip(given, each.input_specs)))
        ]
        return found

    known[operator] = strategies


def _ways(given):
    """In which ways a call can be divided over one axis of a mesh."""
    ways = [WHOLE, HEADS]
    is_packed = any(given.get(name) is not None for name in ("cu_seqlens_q", "cu_seqlens_k", "cu_new"))
    # Sequences append to pages of one cache.
    if not is_packed and not ("k_cache" in given and given["page_table"] is not None):
        ways.append(BATCH)
    return ways


def _sharding(operator, given, way):
    """(placements of the results, placements of the arguments)."""
    from torch.distributed.tensor import Partial

    is_paged = given.get("page_table") is not None
    axes = len(given["q"].shape)
    # Where these are not given, the result is a placeholder without elements.
    has = {"rotated": given.get("cos") is not None, "dsinks": given.get("sinks") is not None}
    outputs = []
    for name in _OUTPUTS[operator]:
        like = "q" if name in ("out", "rotated") else name
        count = {"lse": axes - 1, "dsinks": 1}.get(name) or len(given[like].shape)
        if name in ("k", "v") and is_paged and way == BATCH:
            # Each rank has the gradients that its sequences give to the pages of all.
            outputs.append(Partial())
        else:
            outputs.append(placed(like, count, way if has.get(name, True) else WHOLE, is_paged))
    inputs = [
        placed(name, len(value.shape), way, is_paged) if hasattr(value, "placements") else None
        for name, value in given.items()
    ]
    return outputs, inputs


def placed(name, axes, way, is_paged):
    """The placement of a tensor over one axis of a mesh."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if way == HEADS:
        if name in _ROWS or name in ("lse", "dlse"):
            return Shard(axes - 2)
        if name in ("alibi_slopes", "sinks", "dsinks", *DESCALES):
            return Shard(axes - 1)
    if way == BATCH:
        if name == "dsinks":
            return Partial()
        has_batch = name in _ROWS or name in ("lse", "dlse") or name in _PER_SEQUENCE
        is_shared = is_paged and name in ("k", "v")
        by_sequence = axes == 2 or (name in DESCALES and axes == 3 and not is_paged)
        if (has_batch and not is_shared) or (name in ("alibi_slopes", *DESCALES) and by_sequence):
            return Shard(0)
    return Replicate()


def _is_right(given, wanted):
    """Whether tensors placed in this way can be computed: ranks that have some of the query heads have their
    K/V heads, and what is written in place stays where it is."""
    for name in ("k_cache", "v_cache"):
        if name in given and wanted[name].placements != given[name].placements:
            return False
    keys = "k_cache" if "k_cache" in given else "k"
    heads_q, heads_kv = given["q"].shape[-2], given[keys].shape[-2]
    return heads_q == heads_kv or heads_kv % _ranks_by_heads(wanted[keys], len(given[keys].shape)) == 0


def _ranks_by_heads(spec, axes):
    ranks = 1
    for axis, placement in enumerate(spec.placements):
        if placement.is_shard(axes - 2):
            ranks *= spec.mesh.size(axis)
    return ranks


def distributed(named, others):
    """The tensors `others` (a tuple) as DTensors, where the tensors of `named` are: what is no DTensor is the
    same on each rank."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not any(isinstance(x, module.DTensor) for x in (*named.values(), *others)):
        return others
    first = next((name for name, x in named.items() if isinstance(x, module.DTensor)), None)
    for name, x in named.items():
        if not isinstance(x, module.DTensor):
            there = "one of its lengths, slopes or sinks" if first is None else first
            raise InputTypeError(
                f"{name} is no DTensor and {there} is: give all of a call's tensors as DTensors, by "
                "distribute_tensor"
            )
    mesh = named[first].device_mesh
    whole = [module.Replicate()] * mesh.ndim

    def placed(x):
        if not isinstance(x, torch.Tensor) or isinstance(x, module.DTensor):
            return x
        return module.DTensor.from_local(x, mesh, whole, run_check=False)

    return tuple(map(placed, others))


def check_caches(k_cache, v_cache, table, is_packed):
    """Refuses caches that no rank can append to: what is written in place is not redistributed."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(k_cache, module.DTensor):
        return
    if not isinstance(v_cache, module.DTensor) or v_cache.placements != k_cache.placements:
        placements = getattr(v_cache, "placements", "on one rank")
        raise UnsupportedError(
            f"k_cache is placed as {k_cache.placements} and v_cache {placements}: place both in one way"
        )
    by_batch = table is None and not is_packed
    ranks = {0: 1, 2: 1}
    for axis, placement in enumerate(k_cache.placements):
        along = next((at for at in ranks if placement.is_shard(at)), None)
        if not placement.is_replicate() and (along is None or (along == 0 and not by_batch)):
            raise UnsupportedError(
                f"k_cache is placed as {k_cache.placements}: rows are appended to caches that are whole or "
                "sharded by heads, Shard(2), and, where nothing is packed or in pages, by sequences, Shard(0)"
            )
        if along is not None:
            ranks[along] *= k_cache.device_mesh.size(axis)
    batch, _, heads, _ = k_cache.shape
    if batch < ranks[0] or (ranks[2] > 1 and heads % ranks[2]):
        raise UnsupportedError(
            f"k_cache is placed as {k_cache.placements} on {ranks[0]} x {ranks[2]} ranks: rows are appended "
            f"to caches of at least a sequence a rank (there are {batch}) and of as many heads on each (of "
            f"{heads})"
        )
