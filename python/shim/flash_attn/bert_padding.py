"""Stands in for flash_attn.bert_padding."""

import importlib

import torch


def __getattr__(name):
    """einops' functions, which programs import from here, where it is installed."""
    if name in ("rearrange", "repeat"):
        return getattr(importlib.import_module("einops"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def index_first_axis(values, indices):
    """The rows of `values` at these indices; differentiable."""
    return values[indices]


def index_put_first_axis(values, indices, first_axis_dim):
    """The rows put at these indices of so many rows, 0 elsewhere."""
    rows = values.new_zeros(first_axis_dim, *values.shape[1:])
    return rows.index_copy(0, indices.long(), values)


class IndexFirstAxis:
    """The first of these functions as programs call it that take it for autograd's."""

    apply = staticmethod(index_first_axis)


class IndexPutFirstAxis:
    """The second, likewise."""

    apply = staticmethod(index_put_first_axis)


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """Rows of (batch, seqlen, ...) where either mask is set, end to end: (rows, their indices, starts int32
    (batch + 1,), the longest length, rows of `attention_mask` per sequence)."""
    both = attention_mask if unused_mask is None else attention_mask + unused_mask
    used = attention_mask.sum(-1, dtype=torch.int32)
    return (*_packed(hidden_states, both.sum(-1, dtype=torch.int32), both), used)


def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """The same where each row of the batch is several sequences: `attention_mask_in_length` (batch, seqlen)
    has their lengths, then 0. Returns (rows, their indices, starts, the longest length)."""
    rows = attention_mask_in_length.sum(-1, keepdim=True)
    both = torch.arange(attention_mask_in_length.shape[1], device=rows.device) < rows
    lengths = attention_mask_in_length[attention_mask_in_length != 0].to(torch.int32)
    return _packed(hidden_states, lengths, both)


def _packed(hidden_states, lengths, mask):
    indices = mask.flatten().nonzero().flatten()
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, starts, longest


def pad_input(hidden_states, indices, batch, seqlen):
    """The rows put at their indices in (batch, seqlen, ...), 0 elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
