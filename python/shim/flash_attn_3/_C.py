"""The operators `torch.ops.flash_attn_3.fwd` and `bwd`, which torch's `activate_flash_attention_impl("FA3")`
puts beneath its `scaled_dot_product_attention` and `varlen_attn`."""

import torch

_LENGTHS = "Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k"
_WINDOW = "float? softmax_scale, bool is_causal, int window_size_left, int window_size_right"
_FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(a!)? out, "
    f"Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, {_LENGTHS}, Tensor? page_table, "
    "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    f"{_WINDOW}, int attention_chunk, float softcap, "
    "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin) "
    "-> (Tensor(a!), Tensor, Tensor, Tensor)"
)
_BWD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, "
    "Tensor(b!)? dk, Tensor(c!)? dv, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    f"{_LENGTHS}, {_WINDOW}, float softcap, bool deterministic, int sm_margin) -> Tensor"
)


def _forward(*arguments):
    from flash_attn_interface import _flash_attn_forward

    return _flash_attn_forward(*arguments)


def _backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *others):
    from flash_attn_interface import _flash_attn_backward

    lengths, options = others[:6], others[6:]
    return _flash_attn_backward(dout, q, k, v, out, softmax_lse, *lengths, dq, dk, dv, *options)


_library = torch.library.Library("flash_attn_3", "DEF")
for _schema, _function in ((_FWD, _forward), (_BWD, _backward)):
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")
