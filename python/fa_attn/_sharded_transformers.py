"""Packed batches of transformers' models over ranks: functions with the names and arguments of
ring-flash-attention's adapter."""

from __future__ import annotations

from ._core import InputError, UnsupportedError
from ._sharded_packed import llama3_flash_attn_prepare_cu_seqlens, llama3_flash_attn_varlen_func
from ._sharded_peers import place

_lengths = {}


def update_ring_flash_attn_params(cu_seqlens, process_group):
    """Says where the sequences of the next batch begin: of the packed rows of all ranks, which the models see
    in equal parts."""
    world, rank = place(process_group)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
    _lengths.update(zip(names, llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank, world)))


def substitute_hf_flash_attn(process_group, heads_k_stride, name="flash_attention_2"):
    """Makes the models of transformers (5 or newer) that are made with `attn_implementation=name` attend to
    the keys of all ranks: their rows are this rank's part of a packed batch, in a batch of one, whose
    sequences `update_ring_flash_attn_params` has named. `heads_k_stride`: K/V heads that are gathered at a
    time. Other names than transformers' own need no package flash_attn."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def attention(
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=None,
        dropout=0.0,
        sliding_window=None,
        softcap=None,
        is_causal=None,
        s_aux=None,
        **_,
    ):
        if not _lengths:
            raise InputError("no sequences are set: call update_ring_flash_attn_params for each batch")
        if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
            raise UnsupportedError(
                f"{query.shape[0]} sequences of {query.shape[2]} queries and {key.shape[2]} keys: give this "
                "rank's packed rows in a batch of one, without a cache"
            )
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            raise UnsupportedError("attention that is not causal: use llama3_flash_attn_varlen_func")
        if s_aux is not None:
            raise UnsupportedError("sinks of packed sequences over ranks: use fa_attn.distributed.attention")
        out = llama3_flash_attn_varlen_func(
            *(x[0].transpose(0, 1) for x in (query, key, value)),
            **_lengths,
            heads_k_stride=heads_k_stride,
            dropout_p=dropout,
            softmax_scale=scaling,
            causal=True,
            # A window counts the query's own position.
            window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
            softcap=softcap or 0.0,
            group=process_group,
        )
        return out[None], None

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, lambda *_, **others: None)
