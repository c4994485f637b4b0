"""Torch tensors: on the CPU or on a GPU's current stream, with gradients, under torch.compile and in CUDA
graphs.

Plain tensors take the short way: memory by torch, one call into the library, `torch.autograd.Function` where
gradients are wanted. Everything that looks at operators instead of calling them (torch.compile, fake tensors,
subclasses) sees the operators `fa_attn::forward` and `fa_attn::backward`.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch.autograd.function import once_differentiable

from . import _core
from ._checks import array
from ._core import InputTypeError, UnsupportedError
from ._faces import find_nvrtc

find_nvrtc()

has_autograd = True

# With the C exchange API the library asks torch for its current stream.
_ASKS_STREAM = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_is_compiling = torch.compiler.is_compiling
# Within vmap, grad, vjp and their like.
_is_transforming = torch._C._are_functorch_transforms_active
_empty = torch.empty
_FLOAT = torch.float32


def _stream(q):
    """The current stream's handle; None where the library asks for it itself."""
    if _ASKS_STREAM or not q.is_cuda:
        return None
    return torch.cuda.current_stream(q.device).cuda_stream


def _allocator(q):
    """What gives a kernel its workspace, in torch's memory."""
    device = q.device

    def allocate(count, zero):
        make = torch.zeros if zero else torch.empty
        return make(count, dtype=torch.uint8, device=device)

    return allocate


_ALLOCATORS = {}


def _allocate(q):
    if not q.is_cuda:
        return None
    key = q.device.index
    allocator = _ALLOCATORS.get(key)
    if allocator is None:
        allocator = _ALLOCATORS[key] = _allocator(q)
    return allocator


def _lse_shape(q):
    shape = q.shape
    return (shape[0], shape[2], shape[1]) if len(shape) == 4 else (shape[1], shape[0])


def _out_shape(q, v):
    return (*q.shape[:-1], v.shape[-1])


def _fresh(q, v, extras):
    """Room for out and LSE; on the CPU, and where queries are used in part, rows of no sequence are 0."""
    if extras is not None and (extras[2] is not None or (extras[0] is not None and not q.is_cuda)):
        out = torch.zeros(_out_shape(q, v), dtype=q.dtype, device=q.device)
        return out, torch.full(_lse_shape(q), float("-inf"), dtype=_FLOAT, device=q.device)
    out = _empty(_out_shape(q, v), dtype=q.dtype, device=q.device)
    return out, _empty(_lse_shape(q), dtype=_FLOAT, device=q.device)


def _rows(x):
    """The tensor with contiguous rows, as FlashAttention makes them."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 else x.contiguous()


def _aligned(x):
    """A tensor from autograd as kernels read it: expanded and oddly strided ones are copied."""
    x = x.resolve_neg()
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in x.stride()[:-1]):
        return x
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _forward(q, k, v, scale, causal, window, softcap, extras):
    out, lse = _fresh(q, v, extras)
    _core.forward(q, k, v, out, lse, scale, causal, window, softcap, extras, _stream(q), _allocate(q))
    return out, lse


def _backward(
    dout, q, k, v, out, lse, grads, scale, causal, window, softcap, deterministic, extras, dlse=None
):
    """Writes the gradients to `grads`; returns that of the sinks, or None."""
    dout = torch.zeros_like(out) if dout is None else _aligned(dout)
    dlse = None if dlse is None else dlse.contiguous()
    if dlse is not None and dlse.shape != lse.shape:
        raise _core.InputError(
            f"dlse has the shape {tuple(dlse.shape)}: it must be that of softmax_lse, {tuple(lse.shape)}"
        )
    dsinks = None
    if extras is not None and extras[6] is not None:
        dsinks = _empty(extras[6].shape, dtype=_FLOAT, device=q.device)
    _core.backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        *grads,
        dsinks,
        scale,
        causal,
        window,
        softcap,
        deterministic,
        extras,
        _stream(q),
        _allocate(q),
        *(() if dlse is None else (None, dlse)),
    )
    return dsinks


def _room_for_gradients(q, k, v, extras):
    """Of packed sequences, and of rows used in part, those that no sequence has get 0."""
    make = torch.empty if extras is None or all(x is None for x in extras[:4]) else torch.zeros
    return [make(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]


class _Attention(torch.autograd.Function):
    """out and LSE of q, k, v and sinks."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, scale, causal, window, softcap, deterministic, extras):
        out, lse = _forward(q, k, v, scale, causal, window, softcap, extras)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = (scale, causal, window, softcap, deterministic)
        ctx.extras = extras
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 10
        q, k, v, out, lse = ctx.saved_tensors
        grads = _room_for_gradients(q, k, v, ctx.extras)
        dsinks = _backward(dout, q, k, v, out, lse, grads, *ctx.options, ctx.extras, dlse)
        return (*grads, dsinks, *(None,) * 6)


class _PackedAttention(torch.autograd.Function):
    """The same of q, k and v in one tensor, whose gradients are written in one."""

    @staticmethod
    def forward(ctx, qkv, axis, sinks, scale, causal, window, softcap, deterministic, extras):
        q, k, v = qkv.unbind(axis)
        out, lse = _forward(q, k, v, scale, causal, window, softcap, extras)
        ctx.save_for_backward(qkv, out, lse)
        ctx.options = (scale, causal, window, softcap, deterministic)
        ctx.extras, ctx.axis = extras, axis
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 9
        qkv, out, lse = ctx.saved_tensors
        varied = ctx.extras is not None and any(x is not None for x in ctx.extras[:4])
        make = torch.zeros if varied else torch.empty
        dqkv = make(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        q, k, v = qkv.unbind(ctx.axis)
        dsinks = _backward(dout, q, k, v, out, lse, dqkv.unbind(ctx.axis), *ctx.options, ctx.extras, dlse)
        return (dqkv, None, dsinks, *(None,) * 6)


def _goes_by_operator(*tensors):
    if _is_compiling() or _is_transforming() or tensors[0].is_meta:
        return True
    for x in tensors:
        if type(x) not in _PLAIN:
            if not isinstance(x, torch.Tensor):
                raise InputTypeError(
                    f"{type(x).__name__} beside torch tensors: convert it by torch.from_dlpack"
                )
            return True
    return False


def _autocast(*tensors):
    """The tensors as autocast has them, where they are of several types or float32."""
    kind = tensors[0].device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        tensors = [x.to(dtype) if x.is_floating_point() else x for x in tensors]
    return tensors


def _pad(x, columns):
    return torch.nn.functional.pad(x, (0, columns - x.shape[-1]))


def attention(q, k, v, scale, causal, window, softcap, deterministic, extras):
    """(out, lse); see `fa_attn.interface` for shapes and options."""
    by_operator = _goes_by_operator(q, k, v)
    if q.dim() < 3 or v.dim() < 3:
        raise _core.InputError(
            f"q and v have the shapes {tuple(q.shape)} and {tuple(v.shape)}: they must be (batch, seqlen, "
            "heads, head_dim) or (total, heads, head_dim)"
        )
    dtype = q.dtype
    if dtype is _FLOAT or k.dtype is not dtype or v.dtype is not dtype:
        q, k, v = _autocast(q, k, v)
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    if q.is_cuda and (head_dim % 8 or head_dim_v % 8):
        # Kernels read rows of multiples of 8 elements; FlashAttention pads the same way.
        scale = head_dim**-0.5 if scale is None else scale
        columns, columns_v = -(-head_dim // 8) * 8, -(-head_dim_v // 8) * 8
        out, lse = attention(
            _pad(q, columns),
            _pad(k, columns),
            _pad(v, columns_v),
            scale,
            causal,
            window,
            softcap,
            deterministic,
            extras,
        )
        return out[..., :head_dim_v], lse
    if by_operator:
        return _by_operator(q, k, v, scale, causal, window, softcap, deterministic, extras)
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        q, k, v = _rows(q), _rows(k), _rows(v)
    if q.is_neg() or k.is_neg() or v.is_neg():
        # DLPack does not tell.
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    sinks = None if extras is None else extras[6]
    if sinks is not None:
        _tensor("sinks", sinks)
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    ):
        if extras is not None:
            extras = _detached(extras)
        return _Attention.apply(q, k, v, sinks, scale, causal, window, softcap, deterministic, extras)
    return _forward(q, k, v, scale, causal, window, softcap, None if extras is None else _detached(extras))


def _tensor(name, value):
    if value is not None and not isinstance(value, torch.Tensor):
        raise InputTypeError(
            f"{name} is {type(value).__name__} beside torch tensors: convert it by torch.from_dlpack"
        )


def _detached(extras):
    """Slopes and sinks as the library reads them: float32, apart from autograd."""
    *tensors, slopes, sinks, max_q, max_k = extras
    for name, value in (("alibi_slopes", slopes), ("sinks", sinks)):
        _tensor(name, value)
    if slopes is not None and slopes.requires_grad:
        raise UnsupportedError("alibi_slopes have no gradient: detach them")
    if sinks is not None:
        sinks = sinks.detach()
        if sinks.dtype != _FLOAT:
            sinks = sinks.to(_FLOAT)
    return (*tensors, slopes, sinks, max_q, max_k)


def packed_attention(qkv, axis, scale, causal, window, softcap, deterministic, extras):
    """`attention` of q, k and v in one tensor along `axis`, with one gradient of the whole."""
    sinks = None if extras is None else extras[6]
    _tensor("sinks", sinks)
    plain = not _goes_by_operator(qkv) and qkv.stride(-1) == 1 and not (qkv.is_cuda and qkv.shape[-1] % 8)
    if plain and (qkv.is_neg() or qkv.dtype is _FLOAT):
        plain = not qkv.is_neg() and _autocast(qkv)[0] is qkv
    if plain and qkv.requires_grad and torch.is_grad_enabled():
        extras = None if extras is None else _detached(extras)
        return _PackedAttention.apply(qkv, axis, sinks, scale, causal, window, softcap, deterministic, extras)
    q, k, v = qkv.unbind(axis)
    return attention(q, k, v, scale, causal, window, softcap, deterministic, extras)


def backward(dout, q, k, v, out, lse, scale, causal, window, softcap, deterministic, extras, dlse=None):
    """(dq, dk, dv, dsinks or None), without autograd."""
    extras = None if extras is None else _detached(extras)
    given = dict(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse)
    dout, q, k, v, out, lse = (array(name, x).detach() for name, x in given.items())
    dlse = None if dlse is None else dlse.detach()
    q, k, v = _rows(q), _rows(k), _rows(v)
    grads = _room_for_gradients(q, k, v, extras)
    options = (scale, causal, window, softcap, deterministic)
    dsinks = _backward(dout, q, k, v, out, lse, grads, *options, extras, dlse)
    return (*grads, dsinks)


def append(append):
    """Appends to the caches in place; (q turned, or as it is, lengths afterwards)."""
    a = append
    arguments = (a.k, a.v, a.k_cache, a.v_cache, a.q, a.cos, a.sin, a.interleaved, a.following, a.cu_new)
    arguments += (a.max_new, a.used_k, a.page_table, a.cu_q, a.max_q)
    by_operator = _goes_by_operator(a.q, a.k, a.v, a.k_cache, a.v_cache)
    turned, after = (torch.ops.fa_attn.append if by_operator else _append)(*arguments)
    return (a.q if a.cos is None else turned), after


def _append(
    k,
    v,
    k_cache,
    v_cache,
    q,
    cos,
    sin,
    interleaved,
    following,
    cu_new,
    max_new,
    used_k,
    page_table,
    cu_q,
    max_q,
):
    """(q turned, or nothing without tables, lengths afterwards)."""
    k, v, k_cache, v_cache, q = (x.detach() for x in (k, v, k_cache, v_cache, q))
    after = torch.empty_like(used_k)
    turned = q.new_empty((0,))
    queries = (None, None)
    if cos is not None:
        cos, sin, k, v, q = cos.contiguous(), sin.contiguous(), _rows(k), _rows(v), _rows(q)
        # On the CPU queries are turned in place.
        turned = torch.empty(q.shape, dtype=q.dtype, device=q.device) if q.is_cuda else q.clone()
        queries = (q, turned)
    dropped = _core.append(
        k,
        v,
        k_cache,
        v_cache,
        *queries,
        cos,
        sin,
        interleaved,
        following,
        cu_new,
        max_new,
        used_k,
        page_table,
        cu_q,
        max_q,
        after,
        _stream(q),
    )
    if dropped:
        raise _core.InputError(
            f"{dropped} rows have no place: beyond the cache's room, in a page that does not exist, or "
            "at a position beyond rotary_cos; the others are written"
        )
    return turned, after


def ints(value, count, like):
    return torch.full((count,), value, dtype=torch.int32, device=like.device)


def differences(starts):
    return starts[1:] - starts[:-1]


def merge(outs, lses, sinks, dtype):
    """(out, lse); see `fa_attn.interface.merge`."""
    given = [*outs, *lses] if sinks is None else [*outs, *lses, sinks]
    for name, values in (("a part of outs", outs), ("a part of lses", lses), ("sinks", [sinks])):
        for value in values:
            _tensor(name, value)
    if not isinstance(dtype, torch.dtype):
        raise _core.InputError(f"dtype is {dtype!r}: it must be one of torch's")
    wants_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    # Kernels read rows of multiples of 8 elements.
    odd = outs[0].is_cuda and (outs[0].shape[-1] % 8 or any(x.data_ptr() % 16 for x in outs))
    if wants_gradients or odd or _goes_by_operator(*given):
        return _merged(outs, lses, sinks, dtype)
    out = torch.empty(outs[0].shape, dtype=dtype, device=outs[0].device)
    lse = torch.empty(lses[0].shape, dtype=_FLOAT, device=outs[0].device)
    parts = [_rows(x.detach()) for x in outs]
    masses = [x.detach().contiguous() for x in lses]
    sinks = None if sinks is None else sinks.detach().to(_FLOAT).contiguous()
    _core.merge(parts, masses, out, lse, sinks, _stream(out))
    return out, lse


def _merged(outs, lses, sinks, dtype):
    """`merge` in torch's own operations, which have gradients."""
    masses = torch.stack([lse.to(_FLOAT) for lse in lses])
    lse = torch.logsumexp(masses, 0)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(_FLOAT).view(-1, 1).expand_as(lse))
    # A part without keys has no weight, nor has a row without any.
    weights = torch.exp(masses - lse.masked_fill(lse == float("-inf"), 0.0))
    out = 0
    for part, weight in zip(outs, weights):
        weight = weight.transpose(-1, -2).unsqueeze(-1)
        out = out + torch.where(weight > 0, part.to(_FLOAT), 0.0) * weight
    return out.to(dtype), lse


def without_padding(k_cache, v_cache, leftpad, used, table):
    """A cache whose sequences begin behind their padding: (k, v, cu_seqlens_k or None, rows in use, page
    table or None)."""
    used = (used - leftpad).clamp(min=0).to(torch.int32)
    rows, room = k_cache.shape[:2]
    # Copied where the cache does not lie end to end.
    flat = [x.reshape(rows * room, *x.shape[2:]) for x in (k_cache, v_cache)]
    there = dict(dtype=torch.int32, device=used.device)
    if table is None:
        begins = torch.arange(0, rows * room, max(room, 1), **there) + leftpad
        starts = torch.cat([begins, torch.full((1,), rows * room, **there)])
        return (*flat, starts.to(torch.int32), used, None)
    # Pages of one row, so that a sequence may begin anywhere.
    places = (table[:, :, None] * room + torch.arange(room, **there)).flatten(1)
    columns = torch.arange(places.shape[1], device=used.device) + leftpad[:, None].long()
    table = places.gather(1, columns.clamp(max=places.shape[1] - 1)).to(torch.int32)
    return (*(x.unsqueeze(1) for x in flat), None, used, table.contiguous())


def unstack(tensor, axis):
    return tensor.unbind(axis)


def select(table, rows):
    return table.index_select(0, rows)


def as_column(tensor):
    return tensor.reshape(-1, 1)


# The operators. Options are flat: windows by their sides, what is beside q, k and v one by one.


@torch.library.custom_op("fa_attn::forward", mutates_args=())
def _forward_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: Optional[torch.Tensor],
    cu_k: Optional[torch.Tensor],
    used_q: Optional[torch.Tensor],
    used_k: Optional[torch.Tensor],
    page_table: Optional[torch.Tensor],
    alibi_slopes: Optional[torch.Tensor],
    sinks: Optional[torch.Tensor],
    max_q: int,
    max_k: int,
    scale: Optional[float],
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
) -> Tuple[torch.Tensor, torch.Tensor]:
    del deterministic
    extras = _flat(cu_q, cu_k, used_q, used_k, page_table, alibi_slopes, sinks, max_q, max_k)
    q, k, v = (_rows(x.detach()) for x in (q, k, v))
    return _forward(q, k, v, scale, causal, (left, right), softcap, extras)


@_forward_operator.register_fake
def _(q, k, v, cu_q, cu_k, used_q, used_k, page_table, alibi_slopes, sinks, max_q, max_k, scale, *options):
    return q.new_empty(_out_shape(q, v)), q.new_empty(_lse_shape(q), dtype=_FLOAT)


@torch.library.custom_op("fa_attn::backward", mutates_args=())
def _backward_operator(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: Optional[torch.Tensor],
    cu_q: Optional[torch.Tensor],
    cu_k: Optional[torch.Tensor],
    used_q: Optional[torch.Tensor],
    used_k: Optional[torch.Tensor],
    alibi_slopes: Optional[torch.Tensor],
    sinks: Optional[torch.Tensor],
    max_q: int,
    max_k: int,
    scale: Optional[float],
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    extras = _flat(cu_q, cu_k, used_q, used_k, None, alibi_slopes, sinks, max_q, max_k)
    dout, q, k, v, out, lse = (x.detach() for x in (dout, q, k, v, out, lse))
    q, k, v = _rows(q), _rows(k), _rows(v)
    grads = _room_for_gradients(q, k, v, extras)
    window = (left, right)
    dsinks = _backward(
        dout, q, k, v, out, lse, grads, scale, causal, window, softcap, deterministic, extras, dlse
    )
    return (*grads, q.new_empty((0,), dtype=_FLOAT) if dsinks is None else dsinks)


@_backward_operator.register_fake
def _(dout, q, k, v, out, lse, dlse, cu_q, cu_k, used_q, used_k, alibi_slopes, sinks, *options):
    dsinks = q.new_empty(q.shape[-2:-1] if sinks is not None else (0,), dtype=_FLOAT)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _flat(*extras):
    return None if all(x is None for x in extras[:7]) else _detached(extras)


def _by_operator(q, k, v, scale, causal, window, softcap, deterministic, extras):
    beside = extras if extras is not None else (None,) * 7 + (0, 0)
    cu_q, cu_k, used_q, used_k, table, slopes, sinks, max_q, max_k = beside
    if sinks is not None and sinks.dtype != _FLOAT:
        sinks = sinks.to(_FLOAT)
    left, right = window
    scale = None if scale is None else float(scale)
    operator = torch.ops.fa_attn.forward
    if not _is_compiling() and _is_transforming():
        operator = _Transformed.apply
    return operator(
        q,
        k,
        v,
        cu_q,
        cu_k,
        used_q,
        used_k,
        table,
        slopes,
        sinks,
        max_q,
        max_k,
        scale,
        bool(causal),
        left,
        right,
        float(softcap),
        bool(deterministic),
    )


def _setup(ctx, inputs, output):
    q, k, v, cu_q, cu_k, used_q, used_k, page_table, slopes, sinks, *options = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, used_q, used_k, slopes, sinks)
    ctx.is_paged, ctx.options = page_table is not None, options
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse):
    if ctx.is_paged:
        raise UnsupportedError("keys in pages have no gradients: pack or pad them")
    if dout is None and dlse is None:
        return (None,) * 18
    q, k, v, out, lse, cu_q, cu_k, used_q, used_k, slopes, sinks = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    operator = torch.ops.fa_attn.backward
    if not _is_compiling() and _is_transforming():
        operator = _TransformedBackward.apply
    dq, dk, dv, dsinks = operator(
        dout, q, k, v, out, lse, dlse, cu_q, cu_k, used_q, used_k, slopes, sinks, *ctx.options
    )
    return (dq, dk, dv, *(None,) * 6, None if sinks is None else dsinks, *(None,) * 8)


_forward_operator.register_autograd(_differentiate, setup_context=_setup)


class _TransformedBackward(torch.autograd.Function):
    """The backward operator within torch.func."""

    @staticmethod
    def forward(*arguments):
        return torch.ops.fa_attn.backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise UnsupportedError("second derivatives: gradients are differentiated no further, detach them")

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _one_by_one(_TransformedBackward.apply)(info, in_dims, *arguments)


class _Transformed(torch.autograd.Function):
    """The forward operator within torch.func, which takes no gradients of operators written in Python."""

    @staticmethod
    def forward(*arguments):
        return torch.ops.fa_attn.forward(*arguments)

    setup_context = staticmethod(_setup)
    backward = staticmethod(_differentiate)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _one_by_one(_Transformed.apply)(info, in_dims, *arguments)


def _one_by_one(operator):
    """What vmap makes of an operator: a call for each element."""

    def rule(info, in_dims, *arguments):
        def at(index):
            given = zip(arguments, in_dims)
            return operator(*(x if axis is None else x.select(axis, index) for x, axis in given))

        results = list(zip(*map(at, range(info.batch_size))))
        return tuple(map(torch.stack, results)), (0,) * len(results)

    return rule


for _operator in (_forward_operator, _backward_operator):
    # torch 2.5 and newer.
    if hasattr(_operator, "register_vmap"):
        _operator.register_vmap(_one_by_one(_operator))


@torch.library.custom_op("fa_attn::append", mutates_args=("k_cache", "v_cache"))
def _append_operator(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q: torch.Tensor,
    cos: Optional[torch.Tensor],
    sin: Optional[torch.Tensor],
    interleaved: bool,
    following: bool,
    cu_new: Optional[torch.Tensor],
    max_new: int,
    used_k: torch.Tensor,
    page_table: Optional[torch.Tensor],
    cu_q: Optional[torch.Tensor],
    max_q: int,
) -> Tuple[torch.Tensor, torch.Tensor]:
    arguments = (k, v, k_cache, v_cache, q, cos, sin, interleaved, following, cu_new, max_new, used_k)
    return _append(*arguments, page_table, cu_q, max_q)


@_append_operator.register_fake
def _(k, v, k_cache, v_cache, q, cos, sin, interleaved, following, cu_new, max_new, used_k, *others):
    return q.new_empty((0,) if cos is None else q.shape), torch.empty_like(used_k)
