"""Caches of keys and values in torch's tensors: appending, padding, and results over their parts."""

from __future__ import annotations

import torch

from . import _core
from ._checks import LARGEST, capacity_of, check_pages, check_within_cache, refuse_dropped
from ._codes import is_per_row
from ._torch_memory import (
    FLOAT,
    check_tensor,
    goes_by_operator,
    pad,
    row_step,
    rows_of,
    stream_of,
    words_of,
)
from ._torch_shardings import check_caches, distributed


# Whether a tensor is an element of torch.vmap.
_is_mapped = torch._C._functorch.is_batchedtensor


def host(tensor):
    """The tensor where its elements can be checked; None in a GPU's memory, where a compiler or a mode records
    operators, and for an array of another library, which the extension module reads."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu" or goes_by_operator(tensor):
        return None
    return tensor


def append(append):
    """Appends to the caches in place; returns (q, rotated where there are tables, and the lengths
    afterwards)."""
    a = append
    check_tensor("cache_seqlens", a.used_k)
    if a.cos is not None:
        check_tensor("rotary_cos", a.cos)
        check_tensor("rotary_sin", a.sin)
    arguments = (a.k, a.v, a.k_cache, a.v_cache, a.q, a.cos, a.sin, a.interleaved, a.options.causal)
    arguments += a.options.window
    arguments += (a.cu_new, a.max_new, a.used_k, a.page_table, a.cu_q, a.max_q, a.k_descale, a.v_descale)
    arguments += (a.options.kv_dtype,)
    if goes_by_operator(a.q, a.k, a.v, a.k_cache, a.v_cache):
        if any(map(_is_mapped, (*arguments[:5], a.used_k))):
            raise _core.UnsupportedError(
                "an append within torch.vmap, which maps no operator that writes its arguments: append "
                "outside of it, or make the elements sequences of one batch"
            )
        check_caches(a.k_cache, a.v_cache, a.page_table, a.cu_new is not None or a.cu_q is not None)
        named = dict(q=a.q, k=a.k, v=a.v, k_cache=a.k_cache, v_cache=a.v_cache)
        rotated, after = torch.ops.fa_attn.append(*arguments[:5], *distributed(named, arguments[5:]))
    else:
        rotated, after = run_append(*arguments)
    return (a.q if a.cos is None else rotated), after


def cast_to_cache(k_cache, q, k, v, cos, sin):
    """What joins a cache, in the cache's type where autocast is on, as it casts the arguments of one call to
    one type; the tables stay in float32 or become it."""
    dtype, kind = k_cache.dtype, q.device.type
    if cos is None and q.dtype is k.dtype is v.dtype is dtype:
        return q, k, v, cos, sin
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return q, k, v, cos, sin

    def cast(x, others, to):
        is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.to(to) if is_float and x.dtype not in others else x

    rows = (cast(x, (dtype,), dtype) for x in (q, k, v))
    return (*rows, *(cast(x, (dtype, FLOAT), FLOAT) for x in (cos, sin)))


def run_append(
    k,
    v,
    k_cache,
    v_cache,
    q,
    cos,
    sin,
    interleaved,
    causal,
    left,
    right,
    cu_new,
    max_new,
    used_k,
    page_table,
    cu_q,
    max_q,
    k_descale=None,
    v_descale=None,
    kv_dtype=None,
):
    """(q rotated, or None without tables, and the lengths afterwards)."""
    step = row_step(k_cache)
    if k_cache.is_cuda and (k_cache.shape[-1] % step or v_cache.shape[-1] % step):
        mask = (interleaved, causal, left, right)
        rows = (cu_new, max_new, used_k, page_table, cu_q, max_q, k_descale, v_descale, kv_dtype)
        return append_padded(k, v, k_cache, v_cache, q, cos, sin, *mask, *rows)
    # A detached tensor takes half a microsecond of the host's time.
    k, v, k_cache, v_cache, q = (x.detach() if x.requires_grad else x for x in (k, v, k_cache, v_cache, q))
    used_k, page_table, cu_new, cu_q = (
        # Starts may be arrays of another library.
        x.contiguous() if isinstance(x, torch.Tensor) else x
        for x in (used_k, page_table, cu_new, cu_q)
    )
    descales = [None if x is None else x.detach() for x in (k_descale, v_descale)]
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.is_neg():
            raise _core.InputError(f"{name} is a view of negated elements: give {name}.resolve_neg()")
    k, v = k.resolve_neg(), v.resolve_neg()
    own = [None if x is None else words_of(x) for x in descales]
    after = torch.empty_like(used_k)
    rotated = q.new_empty((0,))
    queries = (None, None)
    if cos is not None:
        cos, sin, k, v, q = words_of(cos), words_of(sin), rows_of(k), rows_of(v), rows_of(q)
        # On the CPU queries are rotated in place.
        rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device) if q.is_cuda else q.clone()
        queries = (q, rotated)
    dropped = _core.append(
        k,
        v,
        k_cache,
        v_cache,
        *queries,
        cos,
        sin,
        interleaved,
        causal or (left, right) != (-1, -1),
        cu_new,
        max_new,
        used_k,
        page_table,
        cu_q,
        max_q,
        after,
        *own,
        kv_dtype,
        stream_of(q),
    )
    for x, made in zip(descales, own):
        # Of a view, as within pages, the rows that are written are those of a copy.
        if is_per_row(x) and made is not x:
            x.copy_(made)
    refuse_dropped(dropped, k_cache, page_table, cos)
    return rotated, after


def append_padded(k, v, k_cache, v_cache, q, *others):
    """The same on copies of the caches whose rows are padded to multiples of 16 bytes, as a GPU's kernel
    needs; FlashAttention does so too."""
    step, dim, dim_v = row_step(k_cache), k_cache.shape[-1], v_cache.shape[-1]
    # A copy of each would write back over what the other has.
    pages = k_cache.stride(0) * k_cache.element_size()
    apart = v_cache.data_ptr() - k_cache.data_ptr()
    is_alike = pages and k_cache.stride() == v_cache.stride()
    if is_alike and apart % pages == 0 and abs(apart) < k_cache.shape[0] * pages:
        raise _core.UnsupportedError(
            f"k_cache and v_cache in pages of one tensor with rows of {dim} elements: a GPU's kernel needs "
            f"multiples of {step}, pad the rows or give two tensors"
        )
    columns, columns_v = -(-dim // step) * step, -(-dim_v // step) * step
    k_copy, v_copy = pad(k_cache.detach(), columns), pad(v_cache.detach(), columns_v)
    # Numbers in an element of the caches.
    per = 2 if others[-1] == "int4" else 1
    rows = (pad(k, columns * per), pad(v, columns_v * per), k_copy, v_copy, pad(q, columns * per))
    rotated, after = run_append(*rows, *others)
    k_cache.detach().copy_(k_copy[..., :dim])
    v_cache.detach().copy_(v_copy[..., :dim_v])
    return (rotated[..., : dim * per].contiguous() if rotated.dim() > 1 else rotated), after


def merge(outs, lses, sinks, dtype):
    """(out, lse); see `fa_attn.interface.merge`."""
    tensors = [*outs, *lses] if sinks is None else [*outs, *lses, sinks]
    names = ["a part of outs"] * len(outs) + ["a part of lses"] * len(lses) + ["sinks"]
    for name, value in zip(names, tensors):
        check_tensor(name, value)
    if not isinstance(dtype, torch.dtype):
        raise _core.InputError(f"dtype is {dtype!r}: it must be one of torch's")
    wants_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if wants_gradients or goes_by_operator(*tensors):
        return _merged(outs, lses, sinks, dtype)
    # Kernels read rows of multiples of 8 elements.
    if outs[0].is_cuda and (outs[0].shape[-1] % 8 or any(x.data_ptr() % 16 for x in outs)):
        return _merged(outs, lses, sinks, dtype)
    out = torch.empty(outs[0].shape, dtype=dtype, device=outs[0].device)
    lse = torch.empty(lses[0].shape, dtype=FLOAT, device=outs[0].device)
    parts = [rows_of(x.detach()) for x in outs]
    lses = [words_of(x.detach()) for x in lses]
    sinks = None if sinks is None else words_of(sinks.detach().to(FLOAT))
    _core.merge(parts, lses, out, lse, sinks, stream_of(out))
    return out, lse


def _merged(outs, lses, sinks, dtype):
    """`merge` in torch's own operations, which have gradients."""
    lses = [lse.to(FLOAT).masked_fill(lse == float("inf"), float("-inf")) for lse in lses]
    if sinks is not None:
        lses.append(sinks.to(FLOAT).view(-1, 1).expand_as(lses[0]))
    lses = torch.stack(lses)
    top = lses.detach().amax(0)
    # Where there is no key, all weights are 0: so are the gradients, where those of torch.logsumexp are NaN.
    weights = torch.exp(lses - top.masked_fill(top == float("-inf"), 0.0))
    total = weights.sum(0)
    is_empty = total == 0
    total = total.masked_fill(is_empty, 1.0)
    lse = (torch.log(total) + top).masked_fill(is_empty, float("-inf"))
    out = 0
    for part, weight in zip(outs, weights / total):
        weight = weight.transpose(-1, -2).unsqueeze(-1)
        out = out + torch.where(weight > 0, part.to(FLOAT), 0.0) * weight
    return out.to(dtype), lse


def without_padding(k_cache, v_cache, leftpad, used, table):
    """The cache seen without the padding before each sequence: (k, v, cu_seqlens_k or None, rows in use, page
    table or None)."""
    check_tensor("cache_leftpad", leftpad)
    check_tensor("cache_seqlens", used)
    rows, page = k_cache.shape[:2]
    capacity = capacity_of(k_cache, table)
    if host(leftpad) is not None:
        check_within_cache("cache_leftpad", leftpad, capacity)
        if table is not None:
            check_pages(table, leftpad, used, page, rows, torch.arange(table.shape[1]))
    caches, int32 = dict(k_cache=k_cache, v_cache=v_cache), torch.int32
    leftpad, used, table = distributed(caches, (leftpad, used, table))

    def numbers(end, dtype=None):
        return distributed(caches, (torch.arange(end, dtype=dtype, device=used.device),))[0]

    # On a GPU what lies beyond the cache is cut off, so that no key of another sequence is read.
    leftpad = leftpad.clamp(0, capacity)
    used = (used.clamp(0, capacity) - leftpad).clamp(min=0).to(int32)
    # Copied where the cache is not contiguous.
    flat = [x.reshape(rows * page, *x.shape[2:]) for x in (k_cache, v_cache)]
    if table is None:
        begins = numbers(rows, int32) * page + leftpad
        return (*flat, torch.nn.functional.pad(begins, (0, 1), value=rows * page).to(int32), used, None)
    # Pages of one row, so that a sequence may begin anywhere.
    places = (table[:, :, None].long() * page + numbers(page)).flatten(1)
    # Entries that are not in use may hold anything: what is no page is kept within int32's range.
    places = places.clamp(-1, LARGEST)
    columns = numbers(places.shape[1]) + leftpad[:, None].long()
    table = places.gather(1, columns.clamp(max=places.shape[1] - 1)).to(int32)
    return (*(x.unsqueeze(1) for x in flat), None, used, table.contiguous())
