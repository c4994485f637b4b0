"""Calls with programs (biases, masks, changes of scores) whose tensors are torch's DTensors: each rank
computes its own heads or sequences, and its programs see the numbers that these have in the whole."""

from __future__ import annotations

import re
import sys

import torch

from ._options import TENSORS
from ._torch_shardings import BATCH, HEADS, WHOLE, distributed, placed

# Arrays whose axes are those of the scores, (batch, heads, queries, keys), and the programs that read them.
_OF_SCORES = ("fa_bias", "fa_mask", "fa_mask_bits")
_READS_SCORES = re.compile(r"array (fa_bias|fa_mask|fa_mask_bits):")


def over_ranks(compute, mods, q, k, v, options, extras, division):
    """`compute` of this rank's part; see `attention_with`."""
    module = sys.modules["torch.distributed.tensor"]
    distributed(dict(q=q, k=k, v=v), ())
    mesh, is_paged = q.device_mesh, extras.page_table is not None
    ways = _ways(q, k, extras)

    def local(name, x):
        if not isinstance(x, module.DTensor):
            x = module.DTensor.from_local(x, mesh, [module.Replicate()] * mesh.ndim, run_check=False)
        if name in TENSORS or name in ("q", "k", "v"):
            wanted = [placed(name, x.dim(), way, is_paged) for way in ways]
        else:
            wanted = [_of_array(module, name, x, way) for way in ways]
        # Ranks that share a tensor and compute different parts have parts of its gradient.
        of_gradient = [
            module.Partial() if place.is_replicate() and way != WHOLE else place
            for place, way in zip(wanted, ways)
        ]
        return x.redistribute(mesh, wanted).to_local(grad_placements=of_gradient)

    own = [local(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    of_extras = {name: getattr(extras, name) for name in TENSORS}
    given = {name: local(name, x) for name, x in of_extras.items() if x is not None}
    arrays = [torch.from_numpy(x).to(q.device) if not isinstance(x, torch.Tensor) else x for x in mods.arrays]
    arrays = [local(name, x) for name, x in zip(mods.names, arrays)]
    # Programs see the numbers in the whole.
    mods = mods.with_arrays(arrays).moved(_first(mesh, ways, own[0], own[1]), keep=_READS_SCORES)
    out, lse = compute(mods, *own, options, extras._replace(**given), division)

    def whole(name, x):
        return module.DTensor.from_local(
            x, mesh, [placed(name, x.dim(), way, is_paged) for way in ways], run_check=False
        )

    return whole("out", out), whole("lse", lse)


def _ways(q, k, extras):
    """By what each axis of the mesh divides the call: as q is placed, where that gives all ranks as much."""
    heads, ranks, ways = q.dim() - 2, {HEADS: 1, BATCH: 1}, []
    is_padded = q.dim() == 4 and extras.page_table is None and k.dim() == 4
    for axis, place in enumerate(q.placements):
        way, counts, size = WHOLE, (), q.device_mesh.size(axis)
        if place.is_shard(heads):
            way, counts = HEADS, (q.shape[-2], k.shape[-2])
        elif place.is_shard(0) and is_padded:
            way, counts = BATCH, (q.shape[0],)
        if way != WHOLE and all(count % (ranks[way] * size) == 0 for count in counts):
            ranks[way] *= size
        else:
            way = WHOLE
        ways.append(way)
    return ways


def _of_array(module, name, x, way):
    axis = {BATCH: 0, HEADS: 1}.get(way)
    if name in _OF_SCORES and axis is not None and x.shape[axis] > 1:
        return module.Shard(axis)
    return module.Replicate()


def _first(mesh, ways, q, k):
    """The numbers in the whole of this rank's first sequence, query head and K/V head."""
    ranks = {HEADS: 0, BATCH: 0}
    for axis, way in enumerate(ways):
        if way != WHOLE:
            ranks[way] = ranks[way] * mesh.size(axis) + mesh.get_local_rank(axis)
    return dict(b=ranks[BATCH] * q.shape[0], h=ranks[HEADS] * q.shape[-2], hk=ranks[HEADS] * k.shape[-2])
