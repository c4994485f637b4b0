"""Stands in for flash_attn.bert_padding."""

import torch


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """Rows of (batch, seqlen, ...) where either mask is set, end to end: (rows, their places, starts int32
    (batch + 1,), the longest, rows of `attention_mask` by sequence)."""
    both = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = both.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = both.flatten().nonzero().flatten()
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, starts, int(lengths.max()), used


def pad_input(hidden_states, indices, batch, seqlen):
    """The rows at their places in (batch, seqlen, ...), 0 elsewhere."""
    out = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return out.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
