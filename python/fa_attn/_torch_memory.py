"""Torch's tensors as the library needs them: the stream, memory for results and workspaces, rows and
addresses that kernels can read."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from ._checks import array
from ._core import BESIDE, InputTypeError, UnsupportedError
from ._nvrtc import find_nvrtc
from ._options import DESCALES, Extras, is_varied
from ._torch_flops import count_operations
from ._torch_shardings import tell_shardings

find_nvrtc()

# With the C exchange API the library asks torch for its current stream.
ASKS_STREAM = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
PLAIN = (torch.Tensor, torch.nn.Parameter)
is_compiling = torch.compiler.is_compiling
# Within vmap, grad, vjp and their like.
is_transforming = torch._C._are_functorch_transforms_active
_top_transform = torch._C._functorch.peek_interpreter_stack
is_batch = torch._C._functorch.is_legacy_batchedtensor
_FUNCTIONALIZE = torch._C._functorch.TransformType.Functionalize
# Of torch.jit.trace, and of modes that see each operator: make_fx, fake tensors, counters of operations.
is_tracing = torch._C._is_tracing
count_modes = torch._C._len_torch_dispatch_stack
# These take half as long as `torch.empty` with a shape, a type and a device, which small calls notice.
_empty_like = torch.empty_like
_CONTIGUOUS = torch.contiguous_format
STRIDED = torch.strided
FLOAT = torch.float32


def is_lasting(x):
    """Whether what is made beside a tensor serves later calls: what a trace, a mode or a compiler makes is of
    that call alone."""
    return type(x) in PLAIN and not (is_compiling() or is_tracing() or count_modes())


def needs_rules():
    """Whether a transform of torch.func looks for the rules of what it is given, which it does not find at
    operators written in Python."""
    if is_compiling() or not is_transforming():
        return False
    return _top_transform().key() != _FUNCTIONALIZE


def stream_of(q):
    """The current stream's handle; None where the library asks torch for it itself."""
    if ASKS_STREAM or not q.is_cuda:
        return None
    return torch.cuda.current_stream(q.device).cuda_stream


def allocate(count, zero, device):
    """A kernel's workspace in torch's memory, on a GPU."""
    make = torch.zeros if zero else torch.empty
    return make(count, dtype=torch.uint8, device=torch.device("cuda", device))


def lse_shape(q):
    shape = q.shape
    return (shape[0], shape[2], shape[1]) if len(shape) == 4 else (shape[1], shape[0])


def out_shape(q, v, per_element=1):
    return (*q.shape[:-1], v.shape[-1] * per_element)


def out_type(q, out_dtype):
    """The type of out: q's, or the one that `CallOptions` name."""
    return q.dtype if out_dtype is None else torch.bfloat16


def new_out(q, v, options):
    """A tensor for out."""
    shape, dtype = out_shape(q, v, options.per_element), out_type(q, options.out_dtype)
    if not options.by_heads:
        return q.new_empty(shape, dtype=dtype)
    batch, rows, heads, columns = shape
    return q.new_empty((batch, heads, rows, columns), dtype=dtype).transpose(1, 2)


def new_results(q, v, has_gaps, options, out=None, wants_lse=True):
    """Tensors for out and LSE. `has_gaps`: whether there may be rows that belong to no sequence and are 0: on
    the CPU, and where queries are used in part. An `out` of the caller's is left unchanged. On a GPU an LSE
    that nobody wants is None."""
    out_dtype, shape = options.out_dtype, out_shape(q, v, options.per_element)
    if has_gaps:
        if q.is_quantized:
            check_tensor("q", q)
        dtype = out_type(q, out_dtype)
        out = torch.zeros(shape, dtype=dtype, device=q.device) if out is None else out
        return out, torch.full(lse_shape(q), float("-inf"), dtype=FLOAT, device=q.device)
    if out is None:
        if q.shape[-1] == shape[-1] and out_dtype is None and not options.by_heads:
            out = _empty_like(q, memory_format=_CONTIGUOUS)
        else:
            out = new_out(q, v, options)
    # A tensor takes more of the host's time than all checks of a call.
    return out, None if not wants_lse and q.is_cuda else q.new_empty(lse_shape(q), dtype=FLOAT)


def rows_of(x):
    """The tensor with rows that the library reads: contiguous, and on a GPU each on 16 bytes. Others are
    copied."""
    if _has_address(x):
        return aligned(x)
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 else x.contiguous()


def words_of(x):
    """The tensor with its elements end to end, without a sign that DLPack does not tell."""
    return x.resolve_neg().contiguous()


def is_aligned(x):
    """Whether kernels can read and write the tensor in place: each row on 16 bytes."""
    if x.is_neg():
        return False
    whole = 16 // x.element_size()
    *outer, last = zip(x.shape, x.stride())
    for size, stride in outer:
        if stride % whole and size > 1:
            return False
    return last[1] == 1 and x.data_ptr() % 16 == 0


def _has_address(x):
    """Whether it is a tensor of a GPU, and none that stands for one."""
    return x.is_cuda and type(x) in PLAIN and not (is_compiling() or is_transforming())


def may_overlap(one, other):
    """Whether the address ranges of both tensors overlap. Arrays of another library share none."""
    if not isinstance(other, torch.Tensor):
        return False
    # What records operators has no addresses.
    if is_compiling() or one.is_meta or not (type(one) in PLAIN and type(other) in PLAIN):
        return False
    if not (one.layout is other.layout is STRIDED) or one.numel() == 0 or other.numel() == 0:
        return False
    first, other_first = one.data_ptr(), other.data_ptr()
    if first > other_first + _reach(other) or other_first > first + _reach(one):
        return False
    return one.device == other.device


def _reach(x):
    """Bytes from the first element to the last."""
    if x.is_contiguous():
        return (x.numel() - 1) * x.element_size()
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) * x.element_size()


def aligned(x):
    """A tensor from autograd that kernels can read: expanded and oddly strided ones are copied."""
    x = x.resolve_neg()
    if is_aligned(x):
        return x
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=_CONTIGUOUS)


def new_gradients(q, k, v, extras):
    """New tensors for gradients. With packed sequences or rows used in part, rows that belong to no sequence
    are 0."""
    made = [_empty_like(x, memory_format=_CONTIGUOUS) for x in (q, k, v)]
    if is_varied(extras):
        # One kernel on a GPU.
        torch._foreach_zero_(made)
    return made


def pad(x, columns):
    return torch.nn.functional.pad(x, (0, columns - x.shape[-1]))


def row_step(k):
    """The elements of which a GPU's kernels read whole multiples in each row: 16 bytes."""
    return 8 if k.element_size() > 1 else 16


def are_whole_rows(k, head_dim, head_dim_v, per_element=1):
    step = row_step(k) * per_element
    return not (head_dim % step or head_dim_v % step)


def on_whole_rows(q, k, v, options):
    """(q, k, v, options) with the columns of rows rounded up by zeros, as FlashAttention pads them, and the
    scale that the call had. Of latent keys both parts are rounded up."""
    step, columns_v = row_step(k), v.shape[-1] * options.per_element

    def whole(x, step=step * options.per_element):
        return pad(x, -(-x.shape[-1] // step) * step)

    if options.scale is None:
        options = options._replace(scale=q.shape[-1] ** -0.5)
    if options.latent:
        q = torch.cat([whole(q[..., :columns_v]), whole(q[..., columns_v:])], -1)
    else:
        q = whole(q)
    return q, whole(k, step), whole(v, step), options


def is_recorded():
    """Whether a trace or a mode records operators."""
    if not (is_tracing() or count_modes()):
        return False
    count_operations()
    return True


_ARGUMENTS = ("q", "k", "v", "k_cache", "v_cache")


def goes_by_operator(*tensors):
    """Whether something records operators, and so would not see what a plain call writes; refuses tensors
    that are not dense, and arrays of another library in place of those of `_ARGUMENTS`."""
    if is_compiling() or is_transforming() or forward_ad._current_level >= 0 or tensors[0].is_meta:
        tell_shardings()
        return True
    if (is_tracing() or count_modes()) and is_recorded():
        tell_shardings()
        return True
    for x in tensors:
        if type(x) not in PLAIN or x.is_nested or x.layout is not STRIDED:
            for name, value in zip(_ARGUMENTS, tensors):
                check_tensor(name, array(name, value))
            tell_shardings()
            return True
    return False


def autocast(*tensors):
    """The tensors as autocast casts them, where they have several types or are float32."""
    kind = tensors[0].device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        tensors = [x.to(dtype) if x.is_floating_point() else x for x in tensors]
    return tensors


def check_extras(extras):
    """Checks the slopes, the sinks and the descales of a call, which are torch's as q is."""
    if extras is None:
        return
    slopes = extras.alibi_slopes
    for name in ("sinks", *DESCALES):
        x = getattr(extras, name)
        if x is not None:
            check_tensor(name, x)
    if slopes is not None:
        check_tensor("alibi_slopes", slopes)
        if slopes.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError("alibi_slopes have no gradient: detach them")


def check_tensor(name, value):
    """Checks that a value is a tensor, and dense."""
    if not isinstance(value, torch.Tensor):
        raise InputTypeError(
            f"{name} is {type(value).__name__} beside torch tensors: convert it by torch.from_dlpack"
        )
    if value.is_nested:
        raise UnsupportedError(
            f"{name} is a nested tensor: give its values() and offsets() to flash_attn_varlen_func"
        )
    if value.layout is not STRIDED:
        raise UnsupportedError(f"{name} is of the layout {value.layout}: it must be dense, {name}.to_dense()")
    if value.is_quantized:
        raise UnsupportedError(f"{name} holds {value.dtype}: it must not be quantized, {name}.dequantize()")


def is_plain(x):
    """Whether the value is a tensor that the library reads as it is where its rows are contiguous: of torch's
    own type and dense."""
    return type(x) in PLAIN and not (x.is_nested or x.layout is not STRIDED or x.is_neg())


def has_rows(x):
    """Whether a plain tensor has rows that the library reads, as `rows_of` makes them."""
    if x.is_cuda:
        return is_aligned(x)
    # Asking this of the whole tensor takes a third of the time, which small calls notice.
    return x.is_contiguous() or x.stride(-1) == 1


def is_dual():
    """Whether forward-mode derivatives are taken."""
    return forward_ad._current_level >= 0


def _are_read_in_place(extras):
    """Whether all tensors are plain and contiguous."""
    for x in extras[:-2]:
        if x is not None and not (is_plain(x) and not x.requires_grad and x.is_contiguous()):
            return False
    return True


def detached(extras):
    """The extra tensors (lengths, tables, slopes, sinks) as the library reads them: contiguous (engines pass
    the columns in use of a longer table, slopes are expanded over a batch), sinks in float32, detached from
    autograd."""
    sinks = extras.sinks
    if sinks is None and _are_read_in_place(extras):
        return extras
    if extras.page_table is not None:
        check_tensor("page_table (block_table)", extras.page_table)
    if sinks is not None:
        sinks = sinks.detach()
        if sinks.dtype != FLOAT:
            sinks = sinks.to(FLOAT)
        extras = extras._replace(sinks=sinks)
    descales = {name: getattr(extras, name) for name in DESCALES}
    descales = {name: x.detach() for name, x in descales.items() if isinstance(x, torch.Tensor)}
    extras = extras._replace(**descales)
    try:
        # Lengths may be arrays of another library.
        ends = [words_of(x) if isinstance(x, torch.Tensor) else x for x in extras[:-2]]
    except RuntimeError:
        for name, x in zip(BESIDE, extras):
            if isinstance(x, torch.Tensor):
                check_tensor(name, x)
        raise
    return Extras(*ends, *extras[-2:])
