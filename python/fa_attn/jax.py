"""Attention of jax's arrays under jit, grad and vmap, on the CPU and on GPUs.

>>> from fa_attn.jax import flash_attn_func
>>> step = jax.jit(jax.grad(lambda q, k, v: flash_attn_func(q, k, v, causal=True).sum(), argnums=(0, 1, 2)))

Compiled programs call the library by `jax.ffi`: arrays are read where XLA has them, on a GPU on the
program's own stream, and nothing goes through Python or the host. vmap folds its axis into the batch. Shapes,
masks and options are those of `fa_attn.interface`; `dot_product_attention` has those of `jax.nn`. Functions
of `fa_attn` itself come here where jax traces them.

Masks, biases and programs of one's own are computed as well (docs/programs.md), with gradients of what they
read; vmap calls them once for each element. K and V in codes, alone or with q, and `qv` have no gradients.
Second and forward-mode derivatives are not computed; a gradient of slopes is NaN. An array that is divided
among devices is gathered, unless the call is within `jax.shard_map`, where gradients of what all devices
share are summed over them.
"""

from __future__ import annotations

import ctypes
import json
import operator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Tuple, Union

import jax
import jax.numpy as jnp
import numpy as np

from . import _core
from . import _jax_composed as composed
from ._checks import check_integers
from ._core import InputError, InputTypeError, UnsupportedError
from ._dropout import halves
from ._modifications import Extents, Modifications, additive
from ._nvrtc import find_nvrtc
from ._options import DESCALES, NO_EXTRAS, TENSORS, CallOptions, Extras
from ._programs import Program
from .interface import flash_attn_func, flash_attn_varlen_func

if TYPE_CHECKING:
    from jax import Array

__all__ = ["dot_product_attention", "flash_attn_func", "flash_attn_varlen_func"]

_PLATFORMS = {"cpu": "cpu", "gpu": "CUDA"}
# Types of codes, which calls take as bytes.
_CODES = (jnp.float8_e4m3fn, jnp.float8_e5m2)
_FORWARD, _BACKWARD = "fa_attn_forward", "fa_attn_backward"


class _Call(NamedTuple):
    """What is known of a call while jax traces it; equal calls share their compiled functions."""

    options: CallOptions
    # The names of the extra tensors that it has.
    names: Tuple[str, ...]
    max_seqlen_q: int
    max_seqlen_k: int
    # Programs: texts, in which no array has a gradient, the names of arrays, and scalars.
    texts: Tuple[str, ...] = ()
    arrays: Tuple[str, ...] = ()
    scalars: Tuple[Tuple[str, float], ...] = ()
    # The arrays whose gradients are wanted.
    wants: Tuple[str, ...] = ()
    # (parts of the keys, whether the heads of a group share a tile), each None for the planner's choice.
    division: Tuple[Optional[int], Optional[bool]] = (None, None)

    def text(self, on_gpu: bool) -> str:
        """The attribute that the handler reads."""
        fields = self.options._asdict()
        fields.update(extras=self.names, max_seqlen_q=self.max_seqlen_q, max_seqlen_k=self.max_seqlen_k)
        mods = Modifications(self.texts, self.arrays, (), self.scalars).with_gradients(self.wants)
        fields.update(texts=mods.texts, arrays=self.arrays, scalars=self.scalars, wants=self.wants)
        return json.dumps(dict(fields, division=self.division, on_gpu=on_gpu))

    def folds(self, rank: int) -> bool:
        """Whether a batch of such calls, with queries of that many axes, is a call of the same form."""
        return (
            rank == 4
            and not self.texts
            and not {"cu_seqlens_q", "cu_seqlens_k", "page_table"} & set(self.names)
        )


@lru_cache(maxsize=None)
def _register() -> None:
    """Makes the handlers known to XLA."""
    if not hasattr(jax, "ffi"):
        raise UnsupportedError(f"jax {jax.__version__} has no jax.ffi: update it to 0.5 or newer")
    find_nvrtc()
    for name, address in zip((_FORWARD, _BACKWARD), _core.xla_handlers()):
        for platform in _PLATFORMS.values():
            capsule = jax.ffi.pycapsule(ctypes.c_void_p(address))
            jax.ffi.register_ffi_target(name, capsule, platform=platform, api_version=1)


def _varying(*arrays: Any) -> Any:
    """The axes of a mesh along which arrays differ, within jax.shard_map that keeps account of them."""
    found: set = set()
    for x in arrays:
        kind = jax.typeof(x) if hasattr(jax, "typeof") else x
        own = getattr(kind, "vma", None)
        found |= (
            own if own is not None else getattr(getattr(kind, "manual_axis_type", None), "varying", set())
        )
    return found


def _varied(x: Any, axes: Any) -> Any:
    """The array as one that differs along these axes of a mesh."""
    more = tuple(sorted(axes - _varying(x)))
    if not more:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, more, to="varying")
    return jax.lax.pvary(x, more)


def _is_divided() -> bool:
    """Whether this is within jax.shard_map."""
    mesh = getattr(jax.sharding, "get_abstract_mesh", lambda: None)()
    return bool(getattr(mesh, "manual_axes", ()))


def _placed(x: Any, like: Any) -> Any:
    """The array laid out over a mesh as another whose type says where it lies."""
    kind = getattr(jax.typeof(like), "sharding", None) if hasattr(jax, "typeof") else None
    if kind is None or not any(axis is not None for axis in kind.spec):
        return x
    return jax.sharding.reshard(x, kind)


def _lse_shape(q: Any) -> Tuple[int, ...]:
    *outer, rows, heads, _ = q.shape
    return (*outer, heads, rows)


def _invoke(name: str, results: Any, call: _Call, *arrays: Any, fills: Any = None) -> Any:
    """The handler's results, on whichever platform the program is compiled for. `fills`: the value of each
    result where nothing is written, as of rows that belong to no sequence."""
    aliases, axes = {}, _varying(*arrays)
    if fills is not None:
        aliases = {len(arrays) + at: at for at in range(len(results))}
        filled = (jnp.full(x.shape, fill, x.dtype) for x, fill in zip(results, fills))
        arrays = (*arrays, *(_varied(x, axes) for x in filled))

    def on(on_gpu: bool) -> Any:
        handler = jax.ffi.ffi_call(name, results, input_output_aliases=aliases)
        return lambda *arrays: handler(*arrays, call=call.text(on_gpu))

    made = jax.lax.platform_dependent(*arrays, cpu=on(False), cuda=on(True))
    return tuple(_varied(x, axes) for x in made)


def _with_vmap(call: _Call, folds: bool, compute: Any) -> Any:
    """The function with a rule for vmap: one call with the axis in the batch where it `folds`, or else one
    call for each element."""

    @jax.custom_batching.custom_vmap
    def function(*arrays: Any) -> Any:
        return tuple(compute(*arrays))

    @function.def_vmap
    def _(size: int, is_batched: Any, *arrays: Any) -> Any:
        extras = dict(zip(call.names, arrays[len(arrays) - len(call.names) :]))
        batched = dict(zip(call.names, is_batched[len(arrays) - len(call.names) :]))
        count = len(arrays) - len(call.names)
        if not folds or batched.get("sinks") or size == 0:

            def one(elements: Any) -> Any:
                it = iter(elements)
                return function(*(next(it) if is_own else x for x, is_own in zip(arrays, is_batched)))

            own = [x for x, is_own in zip(arrays, is_batched) if is_own]
            if size > 0:
                made = jax.lax.map(one, own)
            else:
                shapes = jax.eval_shape(one, [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in own])
                made = tuple(jnp.zeros((0, *x.shape), x.dtype) for x in shapes)
            return made, (True,) * len(made)

        def folded(x: Any, is_own: bool) -> Any:
            x = x if is_own else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(size * x.shape[1], *x.shape[2:])

        batch = arrays[0].shape[1 if is_batched[0] else 0]
        rows = [folded(x, is_own) for x, is_own in zip(arrays[:count], is_batched)]
        for name, x in extras.items():
            if name == "alibi_slopes" and batched[name] and x.ndim == 2:
                # A row of slopes for each element becomes one for each sequence.
                extras[name] = jnp.repeat(x, batch, axis=0)
            elif name != "sinks" and (name != "alibi_slopes" or batched[name] or x.ndim == 2):
                extras[name] = folded(x, batched[name])
        made = function(*rows, *extras.values())
        return tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in made), (True,) * len(made)

    return function


@lru_cache(maxsize=1024)
def _forward_of(call: _Call, rank: int) -> Any:
    def compute(q: Any, k: Any, v: Any, *extras: Any) -> Any:
        dtype = {None: q.dtype, "bf16": jnp.bfloat16, "f32": jnp.float32}[call.options.out_dtype]
        q, k, v = map(_as_bytes, (q, k, v))
        results = (
            jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1] * call.options.per_element), dtype),
            jax.ShapeDtypeStruct(_lse_shape(q), jnp.float32),
        )
        fills = (0, -jnp.inf) if {"cu_seqlens_q", "seqused_q"} & set(call.names) else None
        return _invoke(_FORWARD, results, call, q, k, v, *extras, fills=fills)

    return _with_vmap(call, call.folds(rank), compute)


@lru_cache(maxsize=1024)
def _backward_of(call: _Call, rank: int) -> Any:
    def compute(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, *extras: Any) -> Any:
        results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))
        if "sinks" in call.names:
            results += (jax.ShapeDtypeStruct(q.shape[-2:-1], jnp.float32),)
        own = dict(zip(call.arrays, extras[len(call.names) :]))
        results += tuple(jax.ShapeDtypeStruct(own[name].shape, jnp.float32) for name in call.wants)
        varied = {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"} & set(call.names)
        fills = (0,) * len(results) if varied else None
        return _invoke(_BACKWARD, results, call, dout, q, k, v, out, lse, dlse, *extras, fills=fills)

    # The gradient of the sinks is a sum over the batch, and each element has its own.
    return _with_vmap(call, call.folds(rank) and "sinks" not in call.names, compute)


@lru_cache(maxsize=1024)
def _attention_of(call: _Call, rank: int, is_divided: bool) -> Any:
    """The differentiable function of q, k, v, the extra tensors of a call and the arrays of its programs.
    Within jax.shard_map, whose gradients know of no zeros, all arrays of numbers have theirs computed."""
    own = len(call.names)
    tells_zeros = bool(call.arrays) and not is_divided

    @jax.custom_vjp
    def attention(q: Any, k: Any, v: Any, *extras: Any) -> Any:
        return _forward_of(call, rank)(q, k, v, *extras)

    def forward(*given: Any) -> Any:
        wanted = [x.perturbed if tells_zeros else True for x in given[3 + own :]]
        q, k, v, *extras = (x.value if tells_zeros else x for x in given)
        # An empty tuple is known while jax traces the call, where a truth value is an array.
        wants = tuple(() if one and _is_float(x) else None for one, x in zip(wanted, extras[own:]))
        out, lse = attention(q, k, v, *extras)
        return (out, lse), (q, k, v, out, lse, tuple(extras), wants)

    def backward(saved: Any, gradients: Any) -> Any:
        q, k, v, out, lse, extras, wants = saved
        dout, dlse = (_given(x) for x in gradients)
        if call.options.kv_dtype is not None:
            raise UnsupportedError(
                "k and v in codes: there are no gradients, give q, k and v of 16 bits, or their "
                "jax.lax.stop_gradient"
            )
        if call.options.latent:
            raise UnsupportedError(
                "qv: keys that begin with their values have no gradients, train on the heads before "
                "absorption (DeepSeek's 192-128), of which k and v are projections"
            )
        if "page_table" in call.names:
            raise UnsupportedError("keys in pages have no gradients: pack or pad them")
        names = tuple(name for name, wanted in zip(call.arrays, wants) if wanted is not None)
        compute = _backward_of(call._replace(wants=names), rank)
        dq, dk, dv, *made = compute(dout, q, k, v, out, lse, dlse, *extras)
        others = [_no_gradient(x) for x in extras[:own]]
        if "sinks" in call.names:
            others[call.names.index("sinks")] = made.pop(0)
        found = dict(zip(names, made))
        for name, x in zip(call.arrays, extras[own:]):
            # Of an array that nothing is differentiated by, jax takes any value.
            gradient = jnp.zeros_like(x) if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0)
            others.append(found[name].astype(x.dtype) if name in found else gradient)
        return tuple(
            x if x.dtype == jax.dtypes.float0 else _placed(_varied(x, _varying(like)), like)
            for x, like in zip((dq, dk, dv, *others), (q, k, v, *extras))
        )

    attention.defvjp(forward, backward, symbolic_zeros=tells_zeros)
    return attention


def _as_bytes(x: Any) -> Any:
    """Codes as bytes, not before they are within a function whose gradients are refused."""
    return jax.lax.bitcast_convert_type(x, jnp.uint8) if x.dtype in _CODES else x


def _given(gradient: Any) -> Any:
    """A gradient of a result: an array of zeros where jax knows that it is 0."""
    is_zero = isinstance(gradient, jax.custom_derivatives.SymbolicZero)
    return jnp.zeros(gradient.shape, gradient.dtype) if is_zero else gradient


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _no_gradient(x: Any) -> Any:
    """The gradient of what has none: of whole numbers jax wants its type without values. Slopes have one that
    is not computed: NaN, which no program takes for 0."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return np.zeros(x.shape, jax.dtypes.float0)
    return jnp.full_like(x, jnp.nan)


def packed_bits(mask: Any) -> Any:
    """A mask's bits along the last axis, in words of 32, the lowest first."""
    if mask.shape[-1] == 1:
        return jnp.where(mask, -1, 0).astype(jnp.int32)
    mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % 32)])
    words = mask.reshape(*mask.shape[:-1], -1, 32).astype(jnp.uint32)
    places = jnp.arange(32, dtype=jnp.uint32).reshape((1,) * mask.ndim + (32,))
    return jax.lax.bitcast_convert_type((words << places).sum(-1, dtype=jnp.uint32), jnp.int32)


def _words(value: Any) -> Any:
    """A number of 64 bits, or a key's data, as (lower, upper) uint32."""
    return jnp.uint32(value & 0xFFFFFFFF), jnp.uint32(value >> 32)


def _product(x: Any, by: int) -> Any:
    """(upper, lower) half of x * by, without integers of 64 bits."""
    low, high = x & 0xFFFF, x >> 16
    by_low, by_high = jnp.uint32(by & 0xFFFF), jnp.uint32(by >> 16)
    middle = (low * by_low >> 16) + (low * by_high & 0xFFFF) + (high * by_low & 0xFFFF)
    upper = high * by_high + (low * by_high >> 16) + (high * by_low >> 16) + (middle >> 16)
    return upper, x * jnp.uint32(by)


def kept_bits(extents: Any, threshold: int, rng_state: Any) -> Any:
    """The bits that dropout keeps, by the state, which is (seed, offset) or a key, and the place."""
    if rng_state is None:
        raise InputError("dropout_p without rng_state: give (seed, offset), or a key of jax.random")
    if isinstance(rng_state, jax.Array):
        is_key = jnp.issubdtype(rng_state.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(rng_state) if is_key else rng_state
        if data.shape != (2,) or data.dtype != jnp.uint32:
            raise InputError(
                f"rng_state holds {data.shape} {data.dtype}: it must be a key of jax.random, or (seed, "
                "offset)"
            )
        (upper, lower), offset = (data[0], data[1]), (jnp.uint32(0), jnp.uint32(0))
        seed = lower, upper
    else:
        seed, offset = map(_words, halves(rng_state))
    batch, heads, rows, keys = extents
    blocks, words = -(-rows // 16), -(-keys // 32)
    own = [jnp.arange(size, dtype=jnp.uint32) for size in (batch * heads, blocks, words, 32)]
    head, block, word, lane = jnp.meshgrid(*own, indexing="ij")
    step = 32 * head + lane
    low = offset[0] + step
    counter = (low, offset[1] + (low < step), block, word)
    first, second = seed
    for _ in range(7):
        (high_a, low_a), (high_c, low_c) = _product(counter[0], 0xD2511F53), _product(counter[2], 0xCD9E8D57)
        counter = (high_c ^ counter[1] ^ first, low_c, high_a ^ counter[3] ^ second, low_a)
        first, second = first + jnp.uint32(0x9E3779B9), second + jnp.uint32(0xBB67AE85)
    parts = []
    for half in range(2):
        bits = jnp.zeros_like(lane)
        for i, drawn in enumerate(counter):
            pair = drawn >> (16 * half)
            kept = ((pair & 0xFF) <= threshold) | ((pair >> 8 & 0xFF) <= threshold).astype(jnp.uint32) << 1
            bits = bits | kept.astype(jnp.uint32) << (8 * i + 2 * (lane % 4))
        parts.append(bits.reshape(batch * heads, blocks, words, 8, 4).sum(-1, dtype=jnp.uint32))
    bits = jnp.stack(parts, 2).transpose(0, 1, 2, 4, 3).reshape(batch, heads, blocks * 16, words)[:, :, :rows]
    return jax.lax.bitcast_convert_type(bits, jnp.int32)


# The types that programs read, as tracing declares those that they do not.
_READ = {"float64": "float32", "int64": "int32", "int16": "int32", "int8": "int32"}


def _as_read(x: Any) -> Any:
    if not isinstance(x, jax.core.Tracer) and x.dtype.name == "int64" and x.size:
        check_integers(x.min(), x.max())
    x = jnp.asarray(x)
    return x.astype(_READ.get(x.dtype.name, x.dtype))


def traced_attention(
    q: Any,
    k: Any,
    v: Any,
    options: CallOptions,
    extras: Optional[Extras],
    division: Any = None,
    mods: Optional[Modifications] = None,
) -> Any:
    """(out, lse) with gradients, for the functions of `fa_attn.interface`; checked as far as is known while
    jax traces the call."""
    _register()
    extras = NO_EXTRAS if extras is None else extras
    named = {name: jnp.asarray(x) for name, x in zip(TENSORS, extras) if x is not None}
    if "sinks" in named:
        named["sinks"] = named["sinks"].astype(jnp.float32)
    if q.ndim == 4 and not {"cu_seqlens_k", "page_table"} & set(named):
        # As vmap folds its axis into the batch.
        for name in DESCALES:
            if name in named and named[name].ndim == 1:
                named[name] = jnp.broadcast_to(named[name], (q.shape[0], *named[name].shape))
    like = [_stand_in(x) for x in (q, k, v)]
    stand_ins = {name: np.zeros(x.shape, x.dtype) for name, x in named.items()}
    bounds = (int(extras.max_seqlen_q), int(extras.max_seqlen_k))
    mods = Modifications() if mods is None else mods.with_gradients(())
    arrays = [_as_read(x) for x in mods.arrays]
    given = Extras(**stand_ins, max_seqlen_q=bounds[0], max_seqlen_k=bounds[1])
    programs = mods.with_arrays(map(_stand_in, arrays)).programs
    _core.check_forward(*like, options, given, programs=programs)
    texts = (mods.texts, mods.names, mods.scalars)
    call = _Call(options, tuple(named), *bounds, *texts, division=division or (None, None))
    own = [*map(jnp.asarray, (q, k, v)), *named.values(), *arrays]
    # What all ranks share is copied here, so that its gradient is summed over them.
    axes = _varying(*own)
    return _attention_of(call, q.ndim, _is_divided())(*(_varied(x, axes) for x in own))


def traced_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, options: CallOptions, extras: Any, dlse: Any
) -> Any:
    """(dq, dk, dv, dsinks or None)."""
    _register()
    extras = NO_EXTRAS if extras is None else extras
    named = {name: jnp.asarray(x) for name, x in zip(TENSORS, extras) if x is not None}
    call = _Call(options, tuple(named), int(extras.max_seqlen_q), int(extras.max_seqlen_k))
    dlse = jnp.zeros(_lse_shape(q), jnp.float32) if dlse is None else dlse
    made = _backward_of(call, q.ndim)(dout, q, k, v, out, lse, dlse, *named.values())
    return made if len(made) == 4 else (*made, None)


def traced_merge(outs: Any, lses: Any, sinks: Any, dtype: Any) -> Tuple[Any, Any]:
    """`fa_attn.merge` in jax's own operations."""
    parts = jnp.stack([lse.astype(jnp.float32) for lse in lses])
    parts = jnp.where(jnp.isposinf(parts), -jnp.inf, parts)
    logits = parts
    if sinks is not None:
        column = jnp.asarray(sinks, jnp.float32).reshape((1,) * (parts.ndim - 2) + (-1, 1))
        logits = jnp.concatenate([parts, jnp.broadcast_to(column, (1, *parts.shape[1:]))])
    # Axes are kept, as under jax_numpy_rank_promotion = "raise" arrays have equally many.
    top = jax.lax.stop_gradient(logits.max(0, keepdims=True))
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    total = jnp.exp(logits - top).sum(0, keepdims=True)
    is_empty = total == 0
    total = jnp.where(is_empty, 1.0, total)
    lse = jnp.where(is_empty, -jnp.inf, jnp.log(total) + top)[0]
    weights = jnp.swapaxes(jnp.exp(parts - top) / total, -1, -2)[..., None]
    out = sum(jnp.where(weight > 0, part, 0.0) * weight for part, weight in zip(outs, weights))
    return jnp.asarray(out, dtype), lse


def _stand_in(x: Any) -> Any:
    """An array of the shape and the type, without memory of its own."""
    dtype = np.uint8 if x.dtype in _CODES else x.dtype
    return np.broadcast_to(np.zeros((), dtype), x.shape)


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Optional[Array] = None,
    mask: Optional[Array] = None,
    *,
    scale: Optional[float] = None,
    is_causal: bool = False,
    query_seq_lengths: Optional[Array] = None,
    key_value_seq_lengths: Optional[Array] = None,
    local_window_size: Union[int, Tuple[int, int], None] = None,
    implementation: Optional[str] = None,
    return_residual: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention`: query (batch, rows, heads, head_dim), key and value (batch, keys,
    heads_kv, head_dim), or each without the batch.

    `bias` is added to the scaled scores, with a gradient, `mask` True where a query sees a key; both are
    broadcast to (batch, heads, rows, keys). `scale` may be traced, with a gradient. jax aligns `is_causal`
    and `local_window_size` to the top left: where each sequence has as many queries as keys, one array gives
    both lengths, which is faster. Sides of a window below 0 begin or end it beside the diagonal, as jax's.
    Rows beyond `query_seq_lengths`, and rows that see no key, are 0. `return_residual`: (out, LSE (batch,
    rows, heads)), LSE in key's type and without a gradient, as jax's; `flash_attn_func` gives it in float32
    with its gradient. float64 is computed by jax's operations, with all scores in memory and derivatives of
    every order.
    `implementation`: None, or the name of one of jax's ("xla", "cudnn"), which this one stands for.
    """
    if implementation not in (None, "xla", "cudnn"):
        raise InputError(f"implementation is {implementation!r}: it must be None, 'xla' or 'cudnn'")
    query, key, value = map(jnp.asarray, (query, key, value))
    bias, mask = (x if x is None else jnp.asarray(x) for x in (bias, mask))
    if mask is not None and mask.dtype != bool:
        # Masks of flax are numbers, which would be added to the scores.
        raise InputTypeError(
            f"mask holds {mask.dtype}: it must be bool, as jax's; give bias what is added to scores"
        )
    if bias is not None and jnp.issubdtype(bias.dtype, jnp.integer):
        bias = bias.astype(jnp.float32)
    has_batch = query.ndim == 4
    q, k, v = (x if has_batch else x[None] for x in (query, key, value))
    sides = _sides(local_window_size)
    lengths = query_seq_lengths, key_value_seq_lengths
    if q.dtype == k.dtype == v.dtype == np.float64:
        own = (bias, mask, scale, is_causal, sides, *map(_lengths, lengths))
        out, lse = composed.attention(q, k, v, *own, return_residual)
    else:
        out, lse = _at_the_top_left(q, k, v, bias, mask, scale, is_causal, sides, *lengths)
    out = out if has_batch else out[0]
    if not return_residual:
        return out
    lse = jax.lax.stop_gradient(jnp.swapaxes(lse, -1, -2).astype(key.dtype))
    return out, lse if has_batch else lse[0]


def _sides(window: Any) -> composed.Sides:
    """(left, right) of a window of jax's."""
    if window is None:
        return None
    try:
        left = right = operator.index(window)
    except TypeError:
        left, right = map(operator.index, window)
    return left, right


def _at_the_top_left(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    mask: Any,
    scale: Any,
    is_causal: bool,
    sides: composed.Sides,
    lengths_q: Any,
    lengths_k: Any,
) -> Any:
    """(out, LSE) with a causal mask and a window that begin at the first query and key."""
    left, right = (None, None) if sides is None else sides
    if is_causal:
        right = 0 if right is None else min(right, 0)
    has_mask = left is not None or right is not None
    last = None if right is None else q.shape[1] + right
    if last is not None and last >= q.shape[1] and lengths_k is None and last < k.shape[1] == v.shape[1]:
        # Keys that no query sees are left out: no kernel has a mask whose diagonal ends so far to the left.
        bias, mask = (x if x is None or x.shape[-1] == 1 else x[..., :last] for x in (bias, mask))
        k, v = k[:, :last], v[:, :last]
    band, score, window = None, None, (-1, -1) if sides is None else (left, right)
    are_equal = lengths_q is lengths_k
    lengths_q, lengths_k = map(_lengths, (lengths_q, lengths_k))
    # Nor one that begins beyond the last key, or ends before the diagonal.
    is_beyond = left is not None and left < max(0, q.shape[1] - k.shape[1])
    is_before = right is not None and right < 0
    if has_mask and (is_beyond or is_before or not are_equal):
        # By indices, since the bottom right is elsewhere in each sequence.
        band, is_causal, window = _band(left, right), False, (-1, -1)
        has_mask = False
    if isinstance(scale, jax.core.Tracer):
        extents = Extents(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        score, bias, scale = _scaled_by(scale, bias, extents), None, 1.0
    # From the bottom right of all rows to the top left; of sequences of equal lengths both are the same.
    offset = q.shape[1] - k.shape[1] if lengths_q is None else 0
    return flash_attn_varlen_func(
        q,
        k,
        v,
        softmax_scale=scale,
        causal=is_causal,
        window_size=window,
        query_offset=offset if has_mask else 0,
        bias=bias,
        mask=mask,
        mask_mod=band,
        score_mod=score,
        seqused_q=lengths_q,
        seqused_k=lengths_k,
        return_softmax_lse=True,
    )


def _scaled_by(scale: Any, bias: Any, extents: Extents) -> Program:
    """Scores times a number that jax traces, and a bias."""
    text, arrays = "score = s * fa_scale[0];", {"fa_scale": jnp.reshape(scale, (1,)).astype(jnp.float32)}
    if bias is not None:
        own = additive("bias", bias, extents)
        arrays.update(zip(own.names, own.arrays))
        text = own.texts[0].replace("score = s +", "score = s * fa_scale[0] +")
    return Program(f"array fa_scale: f32[_];\n{text}", arrays)


def _lengths(given: Any) -> Any:
    """Lengths as int32: integers of numpy have 64 bits."""
    if given is None:
        return None
    given = given if hasattr(given, "dtype") else np.asarray(given)
    if given.dtype == np.int32 or not np.issubdtype(given.dtype, np.integer):
        return given
    clip = np.clip if isinstance(given, np.ndarray) else jnp.clip
    return jnp.asarray(clip(given, 0 if given.dtype.kind == "u" else -1, 2**31 - 1), jnp.int32)


def _band(left: Optional[int], right: Optional[int]) -> str:
    """The program of a causal mask or a window that is aligned at the top left."""
    sides = [] if left is None else [f"q - k <= {left}"]
    if right is not None:
        sides.append(f"k - q <= {right}")
    return f"mask = {' && '.join(sides)};"
