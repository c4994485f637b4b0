"""The operations that torch.utils.flop_counter counts for the operators: as for torch's own attention, the
products of every query with every key of its sequence, whatever the mask leaves out."""

from __future__ import annotations

import sys
from operator import mul

import torch

from ._options import Extras
from ._torch_schemas import extras_of, options_of

_is_told = False


def count_operations():
    """Registers the formulas with the counter, where it has been imported, and with counters that are
    running."""
    global _is_told
    counter = sys.modules.get("torch.utils.flop_counter")
    if _is_told or counter is None:
        return
    _is_told = True
    packets = {torch.ops.fa_attn.forward: _forward, torch.ops.fa_attn.backward: _backward}
    packets[torch.ops.fa_attn.forward_program] = _forward_program
    packets[torch.ops.fa_attn.backward_program] = _backward_program
    for packet, formula in packets.items():
        counter.register_flop_formula(packet, get_raw=True)(formula)
    # They copied the formulas when they were made.
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        formulas = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if isinstance(formulas, dict):
            formulas.update(packets)


def _forward(q, k, v, *others, out_val=None):
    extras, others = extras_of(others)
    columns_v = v.shape[-1] * options_of(others)[0].per_element
    return 2 * _pairs(q, k, extras) * (q.shape[-1] + columns_v)


def _backward(dout, q, k, v, out, lse, dlse, *others, out_val=None):
    """The operations of a backward: the scores again, dP and dV, dQ and dK."""
    pairs = _pairs(q, k, Extras(*others[: len(Extras._fields)]))
    return 2 * pairs * (3 * q.shape[-1] + 2 * v.shape[-1])


# The arguments of a program: arrays, scalars and texts.
_PROGRAM = 16 + 8 + 3


def _forward_program(q, k, v, *others, out_val=None):
    return _forward(q, k, v, *others[_PROGRAM:])


def _backward_program(dout, q, k, v, out, lse, dlse, wants, *others, out_val=None):
    return _backward(dout, q, k, v, out, lse, dlse, *others[_PROGRAM:])


def _pairs(q, k, extras):
    """Pairs of a query and a key, over all heads."""
    of_queries = _lengths(q, extras.cu_seqlens_q, extras.seqused_q, None, extras.max_seqlen_q)
    of_keys = _lengths(k, extras.cu_seqlens_k, extras.seqused_k, extras.page_table, extras.max_seqlen_k)
    return q.shape[-2] * sum(map(mul, of_queries, of_keys))


def _lengths(x, starts, used, table, longest):
    """Rows of each sequence; where the lengths cannot be read, the most that it may have."""
    if _is_readable(used):
        return used.tolist()
    if _is_readable(starts):
        return starts.diff().tolist()
    if starts is not None:
        return [longest] * (starts.shape[0] - 1)
    if table is not None:
        return [table.shape[1] * x.shape[1]] * table.shape[0]
    return [x.shape[1]] * x.shape[0]


def _is_readable(lengths):
    return type(lengths) is torch.Tensor and not lengths.is_meta
