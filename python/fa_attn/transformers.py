"""An attention implementation for transformers (5 or newer): `register()`, then `attn_implementation="fa"`.

>>> import fa_attn.transformers
>>> fa_attn.transformers.register()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa", dtype="bfloat16")

Causal, bidirectional and sliding-window attention, grouped heads, soft caps and sinks, padded batches and
packed sequences, masks of any other form (chunks, image spans, 4-D masks) and position biases, on CPUs and
GPUs, with gradients. What the model's mask says is computed, whatever its
layers say; where it makes none, `is_causal` of a layer decides, as in torch's own attention. Dropout,
attention weights, and models that compute attention in their own code (Bloom, MPNet, RoFormer, ...) or
support only their own raise an error.
"""

import weakref

import torch

from . import interface
from ._checks import wants_gradient
from ._core import UnsupportedError
from ._modifications import broadcast
from ._programs import Program
from ._torch_padding import Padding, packed_attention, padded_attention
from ._transformers_masks import (
    FAR,
    Mask,
    ProgramMask,
    band_of,
    made_mask,
    program_mask,
    told_by_positions,
)
from ._transformers_models import check_model, check_when_made

NAME = "fa"

# Arguments of models that change scores, and that are not computed.
_REFUSED = ("head_mask", "alibi", "score_mod", "block_table", "k_cache", "v_cache", "cache")
_REFUSED += ("indices", "block_indices", "sinks")


def register(name=NAME):
    """Registers the implementation under `name`, for every model that chooses by `attn_implementation`."""
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    check_when_made(PreTrainedModel, {name})
    return name


def mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=None,
    attention_mask=None,
    **others,
):
    """What a mask is, as `attention` takes it: see `_transformers_masks.Mask`."""
    check_model(others.get("config"))
    if isinstance(attention_mask, Mask):
        # `generate` makes masks that models pass here again.
        return attention_mask
    device = others.get("device")
    if device is None:
        device = "cpu" if attention_mask is None else attention_mask.device
    device = torch.device(device)
    lengths = (batch_size, q_length, kv_length, q_offset, kv_offset)
    try:
        band = band_of(mask_function)
        if band.chunk is not None and kv_offset + kv_length > band.chunk:
            raise UnsupportedError("chunks")
    except UnsupportedError:
        return program_mask(mask_function, *lengths, attention_mask, device)
    if band.segments is not None and others.get("use_vmap") and (band.segments.diff(dim=1) < 0).any():
        # Of the caller's own.
        raise UnsupportedError("sequences of packed rows whose numbers do not ascend: number them in order")
    return made_mask(band, *lengths, attention_mask, device)


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
    cu_seq_lens_q=None,
    cu_seq_lens_k=None,
    max_length_q=None,
    max_length_k=None,
    **others,
):
    """query (batch, heads, rows, head_dim), key and value (batch, heads_kv, keys, head_dim), read where they
    lie. Returns (out (batch, rows, heads, head_dim_v), None)."""
    if others.get("output_attentions"):
        raise UnsupportedError(
            "output_attentions: weights are never written; use attn_implementation='eager'"
        )
    for name in _REFUSED:
        if others.get(name) is not None:
            raise UnsupportedError(f"{name}: not computed; use attn_implementation='eager' for this model")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    rows, keys = q.shape[1], k.shape[1]
    bias = others.get("position_bias")
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4:
        # A mask of the caller's says all, as for torch's own attention.
        own = dict(softmax_scale=scaling, softcap=softcap or 0.0, sinks=s_aux, bias=bias)
        own["mask"] = attention_mask[..., :keys]
        if softcap and bias is None and attention_mask.is_floating_point():
            added = broadcast("attention_mask", own["mask"], (q.shape[0], q.shape[2], rows, keys))
            own.update(softcap=0.0, mask=None, score_mod=_added_behind_cap(added, softcap))
        return interface.flash_attn_func(q, k, v, dropout, **own), None
    made = attention_mask
    if made is None or not isinstance(made, Mask):
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # A window counts the query's own position. Without a mask eager attention and sdpa have none.
        none = sliding_window is None or attention_mask is None and cu_seq_lens_q is None
        left = FAR if none else sliding_window - 1
        made = Mask((q.shape[0], 1, rows, keys), q.device, left, 0 if causal else left, keys)
        if attention_mask is not None:
            made.padding = _padding_of_last(attention_mask, made)
            if attention_mask.shape[1] < keys:
                k, v = k[:, : attention_mask.shape[1]], v[:, : attention_mask.shape[1]]
    else:
        made = made.attended(rows, keys, type(module).__name__)
    options = dict(softmax_scale=scaling, causal=made.causal, window_size=made.window, softcap=softcap or 0.0)
    stays = made.padding is not None and made.padding.stays
    dense = bias is not None or isinstance(made, ProgramMask) or stays
    if dense or (dropout and cu_seq_lens_q is None):
        if cu_seq_lens_q is not None:
            raise UnsupportedError("cu_seq_lens_q with a bias or a mask of one's own: leave it out")
        if dropout and _told(module, made, rows, keys, others.get("position_ids")) is not None:
            raise UnsupportedError(
                "dropout with packed rows that position_ids alone tell: give cu_seq_lens_q, or a mask"
            )
        _check_batch(module, made, q)
        own = dict(sinks=s_aux, bias=bias, **_dense(made, options))
        return interface.flash_attn_func(q, k, v, dropout, **own), None
    if cu_seq_lens_q is not None:
        # Of a mask that a graph reads it is not known whether it has any.
        if made.padding is not None and isinstance(made.padding.holes, bool):
            raise UnsupportedError("cu_seq_lens_q with padding in attention_mask: leave the padding out")
        starts = [cu.to(torch.int32) for cu in (cu_seq_lens_q, cu_seq_lens_k)]
        longest = [_bound(x, x_rows) for x, x_rows in ((max_length_q, q), (max_length_k, k))]
        flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
        out = interface.flash_attn_varlen_func(*flat, *starts, *longest, dropout, sinks=s_aux, **options)
        return out.reshape(*q.shape[:2], *out.shape[1:]), None
    packed = made.packed or _told(module, made, rows, keys, others.get("position_ids"))
    if packed is not None:
        return packed_attention(q, k, v, packed, s_aux, options), None
    if made.padding is not None:
        _check_batch(module, made, q)
        return padded_attention(q, k, v, made.padding, s_aux, options), None
    if made.used is not None:
        _check_batch(module, made, q)
        return interface.flash_attn_varlen_func(q, k, v, seqused_k=made.used, sinks=s_aux, **options), None
    return interface.flash_attn_func(q, k, v, sinks=s_aux, **options), None


def _added_behind_cap(array, softcap):
    """The scores capped, and the array added to them."""
    element = {torch.float16: "f16", torch.bfloat16: "bf16"}.get(array.dtype, "f32")
    gradient = " grad" if wants_gradient(array) else ""
    text = f"array added: {element}[_, _, _, _]{gradient};\nscalar cap: f32;\n"
    text += "score = cap * tanh(s / cap) + added[b, h, q, k];"
    return Program(text, {"added": array}, {"cap": softcap})


def _dense(made, options):
    """The options of a call in which rows and keys keep their places, as a bias counts them."""
    if isinstance(made, ProgramMask):
        seen = made.padding_of_keys
        own = dict(mask_mod=made.program, mask=None if seen is None else seen[:, None, None])
        return {**options, **own, "causal": False, "window_size": (-1, -1)}
    if isinstance(made.end, torch.Tensor) or made.segments is not None:
        # Of one query as a rule, and of packed rows.
        return {**options, "mask": made.tensor(), "causal": False, "window_size": (-1, -1)}
    seen = None if made.padding is None else made.padding.keys
    if made.used is not None:
        seen = torch.arange(made.shape[3], device=made.device) < made.used[:, None]
    return {
        **options,
        "mask": None if seen is None else seen[:, None, None],
        "query_offset": made.end - made.shape[3],
    }


def _bound(longest, x):
    """An upper bound on the rows of a packed sequence, without waiting for the GPU in a graph."""
    if longest is None or (isinstance(longest, torch.Tensor) and torch.compiler.is_compiling()):
        return x.shape[0] * x.shape[1]
    return longest if isinstance(longest, int) else int(longest)


def _check_batch(module, made, q):
    if made.shape[0] != q.shape[0]:
        raise UnsupportedError(
            f"{type(module).__name__}: a mask of {made.shape[0]} sequences for a batch of {q.shape[0]}; use "
            "attn_implementation='sdpa' for this model"
        )


_last = (lambda: None, None, None)


def _padding_of_last(keys, made):
    """`_padding`, found once for the layers of a model that hand on the same mask."""
    global _last
    if torch.compiler.is_compiling() or keys.is_inference():
        return _padding(keys, made)
    about = (keys._version, made.shape, made.is_aligned)
    tensor, of, padding = _last
    if tensor() is not keys or of != about:
        padding = _padding(keys, made)
        _last = (weakref.ref(keys), about, padding)
    return padding


def _padding(keys, made):
    """The padding of a mask that `mask` has not made: (batch, keys), False or 0 for padding."""
    if keys.dim() != 2 or keys.is_floating_point():
        raise UnsupportedError(
            f"a mask of {keys.dtype} and the shape {tuple(keys.shape)}: computed are masks as (batch, "
            "keys) or with 4 axes; use attn_implementation='sdpa' for others"
        )
    rows, count = made.shape[2], keys.shape[1]
    if count > made.shape[3]:
        raise UnsupportedError(f"a mask of {count} keys for {made.shape[3]}: it must not have more")
    if made.is_aligned and rows > count:
        raise UnsupportedError(
            f"{rows} queries on {count} keys by a causal mask or a window: each query needs a key of its "
            "own, use attn_implementation='sdpa' for this model"
        )
    return Padding.of(keys.to(torch.bool), count, rows, made.is_aligned)


def _told(module, made, rows, keys, position_ids):
    """The packed rows that positions alone tell, as flash_attention_2 finds them: of a row by itself, without
    padding, that has no keys before it."""
    if not isinstance(position_ids, torch.Tensor) or made.shape[0] != 1 or rows != keys or rows == 1:
        return None
    if made.padding is not None or made.used is not None or position_ids.numel() != rows:
        return None
    if getattr(module, "is_cross_attention", False) or "cross" in type(module).__name__.lower():
        return None
    if made.told is None or made.told[0] is not position_ids:
        made.told = (position_ids, told_by_positions(position_ids, made.device))
    return made.told[1]
