"""Torch tensors: on the CPU or on a GPU's current stream, with gradients, under torch.compile and in CUDA
graphs.

Plain tensors take the short path: memory from torch, one call into the library, `torch.autograd.Function`
where gradients are wanted. Everything that records operators instead of calling them (torch.compile, fake
tensors, subclasses) sees the operators `fa_attn::forward` and `fa_attn::backward`.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.autograd.forward_ad import unpack_dual

from . import _core
from . import _torch_codes as codes
from ._checks import check_cache_rows, check_no_overlap, check_out, int32
from ._options import READ_AT_ONCE, Extras, call_options, returned
from ._schedules import SchedulerMetadata
from ._torch_caches import append, cast_to_cache, host, merge, without_padding
from ._torch_latents import chosen, largest_scores, repeated, rows_of_pages, sunk, without_blind
from ._torch_memory import (
    ASKS_STREAM,
    FLOAT,
    PLAIN,
    STRIDED,
    allocate,
    are_whole_rows,
    autocast,
    check_extras,
    check_tensor,
    count_modes,
    goes_by_operator,
    has_rows,
    is_aligned,
    is_compiling,
    is_dual,
    is_tracing,
    is_transforming,
    lse_shape,
    may_overlap,
    new_gradients,
    on_whole_rows,
    out_shape,
    out_type,
    rows_of,
    stream_of,
    words_of,
)
from ._torch_memory import (
    detached as detached_extras,
)
from ._torch_flops import count_operations
from ._torch_operators import by_operator
from ._torch_packed_rows import check_table, gathered, numbers_of, packed_rows, places_of
from ._torch_dropout import kept
from ._torch_programs import attention_with, narrow, packed_bits
from ._torch_passes import (
    Attention,
    CodesWithoutGradients,
    PackedAttention,
    PlainAttention,
    backward_by_operator,
    no_tangents,
    run_backward,
    run_forward,
)

__all__ = [
    "append",
    "attention",
    "backward",
    "bits",
    "cast_to_cache",
    "check",
    "check_table",
    "chosen",
    "codes",
    "contiguous",
    "cut_off",
    "detached",
    "differences",
    "expanded",
    "gathered",
    "has_autograd",
    "host",
    "ints",
    "is_cast",
    "largest_scores",
    "lends",
    "merge",
    "numbers_of",
    "one_after_another",
    "out_of_codes",
    "packed_attention",
    "packed_rows",
    "places_of",
    "plain_attention",
    "plain_attention_on_cache",
    "plain_packed_attention",
    "refuse_gradient",
    "refused",
    "repeated",
    "rows_of_pages",
    "side_by_side",
    "stored",
    "sunk",
    "swapped",
    "table_of_rows",
    "unstack",
    "without_blind",
    "without_padding",
]

# Here all operators are there.
count_operations()

has_autograd = True
lends = False


def attention(q, k, v, options, extras, plans=None, *, out=None, division=None, wants_lse=True, mods=None):
    """(out, lse); see `fa_attn.interface` for shapes and options. `plans`: for calls without gradients, work
    plans that other calls have made, to which this one adds its own. `out`: the tensor that the result is
    written to, without gradients. `division`: how the forward's work is divided, where the caller decides
    it. Where LSE is not wanted it may be None. `mods`: masks and changes of scores of the caller's own."""
    as_operator = goes_by_operator(q, k, v)
    if extras is not None:
        check_extras(extras)
    if q.dim() < 3 or k.dim() < 3 or v.dim() < 3:
        _refuse_axes(q=q, k=k, v=v)
    dtype = q.dtype
    if dtype is FLOAT or k.dtype is not dtype or v.dtype is not dtype:
        q, k, v = autocast(q, k, v)
    per_element = options.per_element
    head_dim, head_dim_v = q.shape[-1], v.shape[-1] * per_element
    is_padded = q.is_cuda and not are_whole_rows(k, head_dim, head_dim_v, per_element)
    if out is not None:
        _check_out(out, q, k, v, options, extras)
        if as_operator or mods is not None or not is_aligned(out) or is_padded:
            made, lse = attention(
                q, k, v, options, extras, plans, division=division, wants_lse=wants_lse, mods=mods
            )
            return out.copy_(made), lse
    if is_padded:
        q, k, v, options = on_whole_rows(q, k, v, options)
        out, lse = attention(
            q, k, v, options, extras, plans, division=division, wants_lse=wants_lse, mods=mods
        )
        return out[..., :head_dim_v].contiguous(), lse
    if mods is not None:
        return attention_with(mods, q, k, v, options, extras, division, wants_lse)
    if as_operator:
        return by_operator(q, k, v, options, extras, division)
    if not (has_rows(q) and has_rows(k) and has_rows(v)):
        q, k, v = rows_of(q), rows_of(k), rows_of(v)
    if q.is_neg() or k.is_neg() or v.is_neg():
        # DLPack does not tell.
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    sinks = None if extras is None else extras.sinks
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    ):
        if extras is not None:
            extras = detached_extras(extras)
        return Attention.apply(q, k, v, sinks, options, extras, division)
    extras = None if extras is None else detached_extras(extras)
    return run_forward(q, k, v, options, extras, plans, out, division, wants_lse)


def is_recorded():
    """Whether something records or converts what a function is given, so that it goes the long way."""
    is_changed = is_compiling() or is_transforming() or is_tracing() or count_modes()
    return is_changed or forward_ad._current_level >= 0


def plain_attention(
    q,
    k,
    v,
    numbers,
    results,
    slopes,
    unasked,
    keywords,
    dropout_p=0.0,
    lengths=None,
    num_splits=None,
    is_cache=False,
    metadata=None,
):
    """What a function returns, where the extension module alone reads, checks and computes the call; None
    where something records or converts what it is given, where it asks for what is not read there, and where
    it is refused, whose error the long way words. The arguments are those of `_core.Plain.forward`."""
    if is_recorded():
        return None
    if metadata is not None and type(metadata) is not SchedulerMetadata:
        return None
    if lengths is not None and type(lengths[2]) is int:
        lengths = _with_array(q, k, lengths)
        if lengths is None:
            return None
    beside = (num_splits, is_cache, metadata, None if ASKS_STREAM else stream_of(q), allocate)
    try:
        made = _plain(q, k, v, numbers, results, slopes, unasked, keywords, dropout_p, lengths, *beside)
        if made is not False:
            return made
        call = (numbers, _WITH_LSE, slopes, unasked, keywords, dropout_p, lengths, *beside)
        sinks = _sinks(keywords)
        out, lse = PlainAttention.apply(q, k, v, sinks, _plain, call, _extras(lengths, slopes, sinks))
    except (_core.InputError, _core.UnsupportedError):
        return None
    return returned(out, lse, *results[1:])


# The results of a forward that is differentiated: no `out` of the caller's, and LSE.
_WITH_LSE = (None, True, False, False)


def plain_attention_on_cache(*call):
    """`plain_attention` of a call that has written a cache, which has no gradients."""
    if not torch.is_grad_enabled():
        return plain_attention(*call)
    with torch.no_grad():
        return plain_attention(*call)


def plain_packed_attention(qkv, axis, *call):
    """`plain_attention` of q, k and v in one tensor along `axis`, whose gradient is one as well: None where
    it is wanted."""
    if qkv.layout is not STRIDED or (qkv.requires_grad and torch.is_grad_enabled()):
        return None
    return plain_attention(*qkv.unbind(axis), *call)


def _with_array(q, k, lengths):
    """`lengths` that `plain_attention` takes with an array in place of one number for all sequences; None
    where the cache has fewer rows."""
    starts, _, used, table, other = lengths[:5]
    table = other if table is None else table
    beside = ((x, axes) for x, axes in ((table, 2), (starts, 1)) if x is not None)
    for x, axes in ((q, 4 if starts is None else 3), (k, 4), *beside):
        if type(x) not in PLAIN or x.layout is not STRIDED or x.dim() != axes:
            return None
    capacity = k.shape[1] * (1 if table is None else table.shape[1])
    if not 0 <= used <= capacity:
        return None
    batch = q.shape[0] if starts is None else starts.shape[0] - 1
    return (*lengths[:2], ints(used, batch, q), *lengths[3:])


def _sinks(keywords):
    """The sinks by any of their names."""
    return next((x for name, x in keywords.items() if x is not None and READ_AT_ONCE[name] == "sinks"), None)


def _extras(lengths, slopes, sinks):
    """The extras of a call that `plain_attention` takes and differentiates."""
    if lengths is slopes is sinks is None:
        return None
    starts_q, starts_k, used_k, _, _, _, most_q, most_k, used_q = lengths or (None,) * 9
    sinks = None if sinks is None else _floats(sinks)
    return Extras(
        starts_q,
        starts_k,
        used_q,
        used_k,
        alibi_slopes=slopes,
        sinks=sinks,
        max_seqlen_q=most_q or 0,
        max_seqlen_k=most_k or 0,
    )


def _new_out(q, columns):
    return q.new_empty((*q.shape[:-1], columns))


def _new_lse(q):
    return q.new_empty(lse_shape(q), dtype=FLOAT)


def _floats(x):
    return words_of(x.detach().to(FLOAT))


def _unused_out(q, columns):
    return q.new_zeros((*q.shape[:-1], columns))


def _unused_lse(q):
    return torch.full(lse_shape(q), float("-inf"), dtype=FLOAT, device=q.device)


def plain_into(new_out, new_lse):
    """`_core.Plain.forward` whose results lie where these two functions say, of q and of its columns."""
    results = (new_out, new_out, new_lse, _unused_out, _unused_lse)
    return _core.Plain(PLAIN, READ_AT_ONCE, results, _floats, torch.is_grad_enabled).forward


_results = (torch.empty_like, _new_out, _new_lse, _unused_out, _unused_lse)
_plain = _core.Plain(PLAIN, READ_AT_ONCE, _results, _floats, torch.is_grad_enabled).forward


def _refuse_axes(**tensors):
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
    raise _core.InputError(
        f"the shapes are {shapes}: each must be (batch, seqlen, heads, head_dim) or (total, heads, head_dim)"
    )


def _check_out(out, q, k, v, options, extras):
    check_tensor("out", out)
    check_out(out, out_shape(q, v, options.per_element), out_type(q, options.out_dtype))
    check_no_overlap(out, q, k, v, extras, may_overlap)
    differentiated = (q, k, v, out) if extras is None else (q, k, v, out, extras.sinks)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in differentiated):
        raise _core.InputError(
            "out with tensors that require gradients: what is written in place has none, leave it out or "
            "call under torch.no_grad()"
        )


def check(q, k, v, options, extras, out):
    """Checks what `attention` is about to be given, without computing anything. What is recorded, what
    autocast will convert and rows that are not contiguous are left to `attention`."""
    kind = q.device.type
    if goes_by_operator(q, k, v) or (kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)):
        return
    check_extras(extras)
    if out is not None:
        _check_out(out, q, k, v, options, extras)
    if all(x.stride(-1) == 1 and not x.is_neg() for x in (q, k, v)):
        extras = None if extras is None else detached_extras(extras)
        q, k, v = (x.detach() if x.requires_grad else x for x in (q, k, v))
        _core.check_forward(q, k, v, options, extras, stream_of(q))


def bits(tensor):
    """Codes as bytes."""
    check_tensor("q, k or v", tensor)
    if tensor.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return tensor
    try:
        return tensor.detach().view(torch.uint8)
    except RuntimeError as error:
        if not is_transforming():
            raise
        held = str(tensor.dtype).rpartition(".")[2]
        raise _core.UnsupportedError(
            f"torch.vmap of {held}: torch has no view of it as bytes, give .view(torch.uint8) of q, k and v "
            "to vmap, and kv_cache_dtype='fp8_e4m3' or 'fp8_e5m2'"
        ) from error


def out_of_codes(_):
    """The type of out where q is codes: FlashAttention's."""
    return "bf16"


def expanded(tensor, shape):
    return tensor.reshape(-1)[:1].expand(shape) if tensor.numel() == 1 else tensor.expand(shape)


def refuse_gradient(name, tensor):
    """Refuses a tensor beside K and V in codes that would get no gradient."""
    check_tensor(name, tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise _core.UnsupportedError(
            f"{name} requires a gradient: with k and v in codes there are none, detach it or call under "
            "torch.no_grad()"
        )


def cut_off(q, k, v, out):
    """q beside K and V in codes, without gradients, which `refused` refuses where they are asked for, as
    torch does where an operator has none; at once where the result is written in place or a program is
    made of the call."""
    named = dict(q=q, k=k, v=v)
    for name, x in named.items():
        check_tensor(name, x)
    if is_dual() and any(unpack_dual(x).tangent is not None for x in named.values()):
        no_tangents(None)
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in named.values())):
        return q
    if out is not None or is_compiling() or is_transforming():
        for name, x in named.items():
            refuse_gradient(name, x)
    return q.detach()


def is_cast(*tensors):
    """Whether tensors become of one type, by autocast."""
    kind = tensors[0].device.type
    is_on = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
    return is_on and all(x.is_floating_point() for x in tensors)


def refused(results, *tensors):
    """The results of codes, whose gradients for `tensors` are refused."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return CodesWithoutGradients.apply(*results, *tensors)
    return results


def floats32(tensor):
    return tensor.float()


def detached(name, tensor):
    check_tensor(name, tensor)
    return tensor.detach()


def contiguous(tensor):
    check_tensor("page_table (block_table)", tensor)
    return tensor.contiguous()


def packed_attention(qkv, axis, options, extras, *, division=None, wants_lse=True, mods=None):
    """`attention` of q, k and v in one tensor along `axis`, with one gradient of the whole."""
    check_extras(extras)
    sinks = None if extras is None else extras.sinks
    plain = (
        mods is None
        and not goes_by_operator(qkv)
        and qkv.stride(-1) == 1
        and not (qkv.is_cuda and qkv.shape[-1] % 8)
    )
    if plain and (qkv.is_neg() or qkv.dtype is FLOAT):
        plain = not qkv.is_neg() and autocast(qkv)[0] is qkv
    if plain and qkv.requires_grad and torch.is_grad_enabled():
        extras = None if extras is None else detached_extras(extras)
        return PackedAttention.apply(qkv, axis, sinks, options, extras, division)
    q, k, v = qkv.unbind(axis)
    return attention(q, k, v, options, extras, division=division, wants_lse=wants_lse, mods=mods)


def backward(dout, q, k, v, out, lse, options, extras, dlse=None):
    """(dq, dk, dv, dsinks or None), without autograd."""
    named = dict(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse)
    for name, x in named.items():
        check_tensor(name, x)
    if dlse is not None:
        check_tensor("dlse", dlse)
    check_extras(extras)
    if goes_by_operator(q, k, v, dout):
        return backward_by_operator(dout, q, k, v, out, lse, dlse, options, extras)
    extras = None if extras is None else detached_extras(extras)
    dout, q, k, v, out, lse = (x.detach().resolve_neg() for x in named.values())
    dlse = None if dlse is None else dlse.detach()
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    grads = new_gradients(q, k, v, extras)
    dsinks = run_backward(dout, q, k, v, out, lse, grads, options, extras, dlse)
    return (*grads, dsinks)


def ints(value, count, like):
    return torch.full((count,), value, dtype=torch.int32, device=like.device)


def differences(starts):
    return starts[1:] - starts[:-1]


def swapped(tensor):
    """The last two axes exchanged."""
    return tensor.transpose(-1, -2)


def stored(values, out):
    """`out`, after writing these values to it."""
    if torch.is_grad_enabled() and out.requires_grad:
        raise _core.InputError("out requires a gradient: detach it, or call under torch.no_grad()")
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride())):
        raise _core.InputError("out is expanded, so that its elements share memory: give one of its own")
    return out.copy_(values)


def unstack(tensor, axis):
    return tensor.unbind(axis)


def one_after_another(tensors):
    """Tensors joined along their first axis."""
    return torch.cat(tensors)


def side_by_side(*tensors):
    """The columns of several tensors in one."""
    return torch.cat(tensors, -1)


def table_of_rows(index, rows, table):
    """The page table of the sequences whose rows in the cache (of `rows` rows), or in `table`, are in
    `index`. Without a table each row of the cache is a page."""
    check_tensor("cache_batch_idx", index)
    if table is not None:
        check_tensor("page_table (block_table)", table)
    int32("cache_batch_idx", index)
    if host(index) is not None:
        check_cache_rows(index, rows, table)
    return index.reshape(-1, 1) if table is None else table.index_select(0, index)
