"""An attention implementation for transformers (5 or newer): `register()`, then `attn_implementation="fa"`.

>>> import fa_attn.transformers
>>> fa_attn.transformers.register()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa", dtype="bfloat16")

Causal, bidirectional and sliding-window attention, grouped heads, soft caps and sinks, padded batches and
packed sequences, on CPUs and GPUs, with gradients. Masks of any other form, dropout, attention weights, and
models that compute attention in their own code (Bloom, MPNet, RoFormer, ...) or support only their own raise
an error.
"""

import functools
import inspect
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
    """What `attention` needs to know of a mask. None where its options say everything; bool (batch, keys),
    False for padding, where there is padding or fewer keys than the cache has room for; int64 (batch, rows),
    a number for each of several sequences packed in a row. Where a graph reads the fill level of its cache:
    int32 (batch,), the number of keys, or int8 (batch, keys), 1 for a key that is not padding, plus 2 for the
    position of a query."""
    _check_model(others.get("config"))
    kinds = _kinds(mask_function, _begins(q_length, kv_length, q_offset), others)
    for kind in kinds:
        if kind not in _KNOWN:
            raise UnsupportedError(
                f"a mask by {kind}: computed are causal and bidirectional masks, sliding windows, padding "
                "and packed sequences; use attn_implementation='sdpa' for this model"
            )
    if any("sliding_window" in kind for kind in kinds) and _has_windows(others.get("config")):
        reason = _loses_window(type(others["config"]))
        if reason:
            raise UnsupportedError(f"{type(others['config']).__name__}: {reason}")
    if _PACKED in kinds:
        if attention_mask is not None and not attention_mask.all():
            raise UnsupportedError("packed sequences with padding: leave the padding out")
        return _segments(mask_function).expand(batch_size, -1).to(torch.int64)
    causal = mask_function is None or "causal_mask_function" in kinds
    compiling, device = torch.compiler.is_compiling(), others.get("device")
    # Of a cache with room for more, the keys that are there, which end with the queries' own; all of an
    # encoder's are.
    present = kv_length
    if causal:
        if isinstance(q_offset, torch.Tensor):
            if compiling:
                return _within_graph(
                    batch_size, q_length, kv_length, q_offset.to(device), kv_offset, attention_mask
                )
            q_offset = int(q_offset)
        present = min(q_offset + q_length - kv_offset, kv_length)
    keys = None
    if attention_mask is not None:
        keys = _keys(attention_mask, kv_offset, present)
        keys = None if not compiling and keys.all() else keys.contiguous()
    if keys is None and present < kv_length:
        keys = torch.ones((1, 1), dtype=torch.bool, device=device).expand(batch_size, present)
    return keys


def _keys(attention_mask, begin, count):
    """Which of the `count` keys from `begin` on are not padding. `generate` makes masks that models pass to
    `mask` again: a mask of exactly `count` keys is already of these."""
    keys = attention_mask.to(torch.bool)
    if keys.shape[1] != count:
        keys = keys[:, begin : begin + count]
    return torch.nn.functional.pad(keys, (0, count - keys.shape[1])) if keys.shape[1] < count else keys


def _within_graph(batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask):
    """The mask of a cache whose fill level is in a tensor, which is not read."""
    first = q_offset - kv_offset
    if attention_mask is None:
        present = (first + q_length).clamp(max=kv_length)
        return present.to(torch.int32).reshape(1).repeat(batch_size)
    places = torch.arange(kv_length, device=attention_mask.device)
    keys = _keys(attention_mask, kv_offset, kv_length) & (places < first + q_length)
    own = (places >= first) & (places < first + q_length)
    return keys.to(torch.int8) + 2 * own.to(torch.int8)


def _check_model(config):
    """Refuses a model that computes attention in its own code, which would mistake this mask for one of
    scores, and a model that supports only its own attention, whose layers need not say what is causal."""
    reason = _reason(type(config)) if config is not None else ""
    if reason:
        raise UnsupportedError(f"{type(config).__name__}: {reason}; use attn_implementation='eager'")


_OWN = "this model computes attention in its own code, whatever attn_implementation says"
_ALONE = "this model supports no attention but its own (neither 'sdpa' nor 'flash_attention_2')"
_SUPPORTS = ("_supports_sdpa", "_supports_flash_attn", "_supports_attention_backend")


def _modeling_of(config):
    """The module that defines a configuration's models, where it has been imported."""
    folder, _, name = config.__module__.rpartition(".configuration_")
    return sys.modules.get(f"{folder}.modeling_{name}") if folder else None


def _own_classes(module):
    classes = () if module is None else vars(module).values()
    return [x for x in classes if isinstance(x, type) and x.__module__ == module.__name__]


@functools.lru_cache(maxsize=None)
def _refusal(config):
    """Why models of a configuration are not supported; empty where they are."""
    module = _modeling_of(config)
    if module is None:
        return ""
    own = _own_classes(module)
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return _OWN if any("Attention" in x.__name__ for x in own) else ""
    models = [x for x in own if hasattr(x, "_supports_sdpa")]
    is_alone = models and not any(getattr(x, name, False) for x in models for name in _SUPPORTS)
    return _ALONE if is_alone else ""


_WINDOW = (
    "its layers do not hand on their sliding window, which only a mask of scores has; use "
    "attn_implementation='sdpa'"
)


@functools.lru_cache(maxsize=None)
def _window_refusal(config):
    """Whether no attention layer of a model names the window that its masks have."""
    module = _modeling_of(config)
    layers = [x for x in _own_classes(module) if "Attention" in x.__name__ and hasattr(x, "forward")]
    return _WINDOW if layers and not any(_names_window(layer.forward) for layer in layers) else ""


def _has_windows(config):
    """Whether a layer may have a sliding window. Models make masks of every form that their layers can have,
    whether or not a layer has it."""
    kinds = getattr(config, "layer_types", None)
    return config is not None and (kinds is None or any("sliding" in kind for kind in kinds))


def _names_window(function):
    code = inspect.unwrap(function).__code__
    words = [word for const in code.co_consts for word in (const if isinstance(const, tuple) else (const,))]
    return "sliding_window" in words or "sliding_window" in code.co_names + code.co_varnames


# A cache of functools is nothing that torch.compile looks into.
_loses_window = torch.compiler.assume_constant_result(lambda config: _window_refusal(config))
_reason = torch.compiler.assume_constant_result(lambda config: _refusal(config))

_PACKED = "packed_sequence_mask_function"

_KNOWN = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "padding_mask_function",
    _PACKED,
}


def _parts(function):
    """The functions whose intersection a mask function is: (name, what it was made with)."""
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


def _kinds(function, begins, others):
    """The names of a mask function's parts. Of one that is made of constants torch.compile sees them as one;
    another, of tensors, ends its graph: of chunks, of a caller's own, and of packed sequences, which
    transformers finds in every graph that `begins` with the first key and caches nothing."""
    if not torch.compiler.is_compiling():
        return _names(function)
    constant = others.get("allow_is_causal_skip") or others.get("allow_is_bidirectional_skip") or not begins
    if others.get("use_vmap") or getattr(others.get("config"), "attention_chunk_size", None):
        constant = False
    return _constant_names(function) if constant else _names_apart(function)


def _begins(q_length, kv_length, q_offset):
    return not isinstance(q_offset, torch.Tensor) and q_offset == 0 and q_length == kv_length


def _names(function):
    return tuple(kind for kind, _ in _parts(function))


_constant_names = torch.compiler.assume_constant_result(lambda function: _names(function))
_names_apart = torch.compiler.disable(_names)


@torch.compiler.disable
def _segments(function):
    """The number of each position's sequence, for a mask function of several sequences in a row."""
    return next(made["packed_sequence_mask"] for kind, made in _parts(function) if kind == _PACKED)


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
    if attention_mask.dtype == torch.int32 and attention_mask.dim() == 1:
        return interface.flash_attn_varlen_func(q, k, v, seqused_k=attention_mask, **options), None
    if attention_mask.dtype == torch.int8 and attention_mask.dim() == 2:
        places = (attention_mask >= 2).to(torch.int8).argmax(1, keepdim=True)
        places = places + torch.arange(q.shape[1], device=q.device)
        keys = attention_mask % 2 == 1
        return _padded(q, k, v, keys, keys.gather(1, places), options), None
    if attention_mask.dtype != torch.bool or attention_mask.dim() != 2:
        raise UnsupportedError(
            f"a mask of {attention_mask.dtype} and the shape {tuple(attention_mask.shape)}: computed are "
            "causal masks and windows, with padding as (batch, keys); use attn_implementation='sdpa' for "
            "others"
        )
    rows, keys = q.shape[1], attention_mask.shape[1]
    k, v = k[:, :keys], v[:, :keys]
    if attention_mask.numel() > 1 and not any(
        stride for size, stride in zip(attention_mask.shape, attention_mask.stride()) if size > 1
    ):
        # One value for all of them, as `mask` makes it: none is padding.
        return interface.flash_attn_func(q, k, v, **options), None
    if not options["causal"] and options["window_size"] == (-1, -1):
        # Of a decoder on an encoder's keys all rows are queries, whatever is padding there.
        return _padded(q, k, v, attention_mask, None, options), None
    if rows > keys:
        raise UnsupportedError(
            f"{rows} queries on {keys} keys by a causal mask or a window: each query needs a key of its own, "
            "use attn_implementation='sdpa' for this model"
        )
    # Queries are the last of the keys.
    return _padded(q, k, v, attention_mask, attention_mask[:, keys - rows :], options), None


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


def _padded(q, k, v, keys, queries, options):
    """Attention without the padding: `keys` and `queries` (batch, rows) mark what is not padding; None for
    all queries. Rows of padding come back as 0. Only the check of a window waits for the GPU."""
    used_k, used_q, order = keys.sum(1, dtype=torch.int32), None, None
    _check_window(keys, used_k, options["window_size"])
    in_front = _in_front(keys)
    k, v = (x.gather(1, in_front.expand(-1, -1, *x.shape[2:])) for x in (k, v))
    if queries is not None:
        used_q, order = queries.sum(1, dtype=torch.int32), _in_front(queries)
        q = q.gather(1, order.expand(-1, -1, *q.shape[2:]))
    out = interface.flash_attn_varlen_func(q, k, v, seqused_q=used_q, seqused_k=used_k, **options)
    if order is None:
        return out
    return torch.zeros_like(out).scatter(1, order.expand(-1, -1, *out.shape[2:]), out)


def _in_front(rows):
    """The order in which the True ones of bool (batch, rows) come first, (batch, rows, 1, 1)."""
    return (~rows).to(torch.int8).argsort(dim=1, stable=True)[:, :, None, None]


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
    if torch.compiler.is_compiling():
        torch._assert_async(~gaps.any(), "padding between the tokens of a row, in a sliding window")
    elif gaps.any():
        raise UnsupportedError(
            f"padding between the tokens of row {int(gaps.nonzero()[0])} of the batch, in a sliding window "
            f"of {widest}: move it to the row's left, or use attn_implementation='sdpa'"
        )
