"""An attention implementation for transformers (5 or newer): `register()`, then `attn_implementation="fa"`.

>>> import fa_attn.transformers
>>> fa_attn.transformers.register()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa", dtype="bfloat16")

Causal, bidirectional and sliding-window attention, grouped heads, soft caps and sinks, padded batches and
packed sequences, on CPUs and GPUs, with gradients. Masks of another form, dropout, attention weights and
models that compute attention in their own code (Bloom, MPNet, RoFormer, ...) raise.
"""

import functools
import sys

import torch

from . import interface
from ._core import UnsupportedError

NAME = "fa"

# Arguments of models that change scores, and that are not computed.
_REFUSED = ("position_bias", "head_mask", "alibi", "score_mod", "block_table", "k_cache", "v_cache", "cache")


def register(name=NAME):
    """Registers the implementation under `name`, for every model that chooses by `attn_implementation`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
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
    """What `attention` needs of a mask: None where its options say everything, bool (batch, keys) where keys
    are padding or fewer than the cache has room for, int64 (batch, rows) with a number for each of several
    sequences packed in a row."""
    _check_model(others.get("config"))
    segments, causal = None, mask_function is None
    for kind, values in _parts(mask_function):
        causal = causal or kind == "causal_mask_function"
        if kind == "packed_sequence_mask_function":
            segments = values["packed_sequence_mask"]
        elif kind not in _KNOWN:
            raise UnsupportedError(
                f"a mask by {kind}: computed are causal and bidirectional masks, sliding windows, padding "
                "and packed sequences; use attn_implementation='sdpa' for this model"
            )
    if segments is not None:
        if attention_mask is not None and not attention_mask.all():
            raise UnsupportedError("packed sequences with padding: leave the padding out")
        return segments.expand(batch_size, -1).to(torch.int64)
    # Of a cache with room for more, the keys that are there, which end with the queries' own; all of an
    # encoder's are.
    present = min(int(q_offset) + q_length - kv_offset, kv_length) if causal else kv_length
    keys = None
    if attention_mask is not None:
        keys = attention_mask.to(torch.bool)[:, kv_offset : kv_offset + present]
        if keys.shape[1] < present:
            keys = torch.nn.functional.pad(keys, (0, present - keys.shape[1]))
        keys = None if keys.all() else keys.contiguous()
    if keys is None and present < kv_length:
        keys = torch.ones((1, 1), dtype=torch.bool, device=others.get("device")).expand(batch_size, present)
    return keys


def _check_model(config):
    """Refuses a model that computes attention in its own code: it would take this mask for one of scores."""
    if config is not None and _has_own(type(config)):
        raise UnsupportedError(
            f"{type(config).__name__}: this model computes attention in its own code, whatever "
            "attn_implementation says; use attn_implementation='eager'"
        )


@functools.lru_cache(maxsize=None)
def _has_own(config):
    folder, _, name = config.__module__.rpartition(".configuration_")
    module = sys.modules.get(f"{folder}.modeling_{name}") if folder else None
    if module is None or hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return False
    own = (x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__)
    return any("Attention" in x.__name__ for x in own)


_KNOWN = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "padding_mask_function",
}


def _parts(function):
    """The functions that a mask function is the intersection of: (name, what it was made with)."""
    if function is None:
        return
    name, *inner = function.__qualname__.split(".<locals>.")
    closed = {}
    if inner:
        code, cells = function.__code__, function.__closure__ or ()
        closed = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells)))
    if name == "and_masks":
        for part in closed["mask_functions"]:
            yield from _parts(part)
    elif name == "remap_positions_for_packed_sequence":
        yield from _parts(closed["mask_function"])
    else:
        yield name, closed


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
    if dropout:
        raise UnsupportedError(
            f"attention_dropout = {dropout}: attention is computed without dropout, set it to 0"
        )
    if others.get("output_attentions"):
        raise UnsupportedError(
            "output_attentions: weights are never written; use attn_implementation='eager'"
        )
    for name in _REFUSED:
        if others.get(name) is not None:
            raise UnsupportedError(f"{name}: not computed; use attn_implementation='eager' for this model")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = (-1, -1)
    if sliding_window is not None:
        # A window counts the query's own position.
        window = (sliding_window - 1, -1 if causal else sliding_window - 1)
    options = dict(
        softmax_scale=scaling, causal=causal, window_size=window, softcap=softcap or 0.0, sinks=s_aux
    )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if cu_seq_lens_q is not None:
        starts = [cu.to(torch.int32) for cu in (cu_seq_lens_q, cu_seq_lens_k)]
        return _packed(q, k, v, starts, (max_length_q, max_length_k), options), None
    if attention_mask is None:
        return interface.flash_attn_func(q, k, v, **options), None
    if attention_mask.dtype == torch.int64:
        starts, longest = _starts(attention_mask)
        return _packed(q, k, v, [starts, starts], (longest, longest), options), None
    if attention_mask.dtype != torch.bool or attention_mask.dim() != 2:
        raise UnsupportedError(
            f"a mask of {attention_mask.dtype} and the shape {tuple(attention_mask.shape)}: computed are "
            "causal masks and windows, with padding as (batch, keys); use attn_implementation='sdpa' for "
            "others"
        )
    keys = attention_mask.shape[1]
    k, v = k[:, :keys], v[:, :keys]
    if attention_mask.numel() > 1 and not any(
        stride for size, stride in zip(attention_mask.shape, attention_mask.stride()) if size > 1
    ):
        # One value for all of them, as `mask` makes it: none is padding.
        return interface.flash_attn_func(q, k, v, **options), None
    return _padded(q, k, v, attention_mask, options), None


def _packed(q, k, v, starts, longest, options):
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    out = interface.flash_attn_varlen_func(*flat, *starts, *map(int, longest), **options)
    return out.reshape(*q.shape[:2], *out.shape[1:])


def _starts(segments):
    """First rows of the sequences of all rows end to end, int32, and the longest's length."""
    batch, rows = segments.shape
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    first = begins.reshape(-1).nonzero().reshape(-1)
    starts = torch.cat([first, first.new_tensor([batch * rows])]).to(torch.int32)
    return starts, int((starts[1:] - starts[:-1]).max())


def _padded(q, k, v, keys, options):
    """Without the padding: rows that are none are left out and come back as 0."""
    batch, rows = q.shape[:2]
    used_k = keys.sum(1, dtype=torch.int32)
    if not options["causal"] and options["window_size"] == (-1, -1):
        # Of a decoder on an encoder's keys all rows are queries, whatever is padding there.
        queries = torch.ones(batch, rows, dtype=torch.bool, device=q.device)
    elif rows <= keys.shape[1]:
        # Queries are the last of the keys.
        queries = keys[:, keys.shape[1] - rows :]
        _check_window(keys, used_k, options["window_size"])
    else:
        raise UnsupportedError(
            f"{rows} queries on {keys.shape[1]} keys by a causal mask or a window: each query needs a key of "
            "its own, use attn_implementation='sdpa' for this model"
        )
    used_q = queries.sum(1, dtype=torch.int32)
    of_k, of_q = (x.reshape(-1).nonzero().reshape(-1) for x in (keys, queries))
    starts = [torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0)) for used in (used_q, used_k)]
    longest = [int(used.max()) for used in (used_q, used_k)]
    flat = [x.flatten(0, 1)[index] for x, index in ((q, of_q), (k, of_k), (v, of_k))]
    out = interface.flash_attn_varlen_func(*flat, *starts, *longest, **options)
    whole = out.new_zeros(batch * rows, *out.shape[1:]).index_copy(0, of_q, out)
    return whole.reshape(batch, rows, *out.shape[1:])


def _check_window(keys, used, window):
    """Refuses padding between the tokens of a row that is longer than its window: without it the window would
    reach keys that it does not count."""
    widest = max(window) + 1
    if widest <= 0 or keys.shape[1] <= widest:
        return
    places = torch.arange(keys.shape[1], device=keys.device)
    last = torch.where(keys, places, -1).amax(1)
    first = torch.where(keys, places, keys.shape[1]).amin(1)
    length = last - first + 1
    gaps = (length > used) & (length > widest)
    if gaps.any():
        raise UnsupportedError(
            f"padding between the tokens of row {int(gaps.nonzero()[0])} of the batch, in a sliding window of "
            f"{widest}: move it to the row's left, or use attn_implementation='sdpa'"
        )
