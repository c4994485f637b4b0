"""The functions on arrays without autograd: numpy, cupy, jax, and others through numpy."""

import importlib

from . import _core
from ._core import InputError, UnsupportedError
from ._faces import find_nvrtc


class _Numpy:
    """Arrays in the CPU's memory."""

    def __init__(self):
        self.np = importlib.import_module("numpy")

    def read(self, array):
        """The array as the module reads it: bfloat16 of ml_dtypes has no name in numpy's DLPack."""
        if array is not None and getattr(array, "dtype", None) is not None and array.dtype.name == "bfloat16":
            return array.view(self.np.uint16)
        return array

    def half(self, q):
        return "bf16" if q.dtype.name == "bfloat16" else None

    def empty(self, shape, like):
        return self.np.empty(shape, like.dtype)

    def zeros(self, shape, like):
        return self.np.zeros(shape, like.dtype)

    def floats(self, shape, like):
        return self.np.empty(shape, self.np.float32)

    def ints(self, value, count, like):
        return self.np.full((count,), value, self.np.int32)

    def copy(self, array):
        return array.copy()

    def stream(self, like):
        return None

    allocate = None

    def give(self, array):
        return array

    def unstack(self, array, axis):
        return [array[(slice(None),) * axis + (i,)] for i in range(array.shape[axis])]


class _Cupy(_Numpy):
    """Arrays of cupy, on its current stream."""

    def __init__(self):
        self.np = importlib.import_module("cupy")
        find_nvrtc()

    def stream(self, like):
        return self.np.cuda.get_current_stream(like.device.id).ptr

    def allocate(self, count, zero):
        make = self.np.zeros if zero else self.np.empty
        return make((count,), self.np.uint8)


class _Jax(_Numpy):
    """Arrays of jax in the CPU's memory: results are made by numpy and handed over."""

    def __init__(self):
        super().__init__()
        self.jax = importlib.import_module("jax")

    def read(self, array):
        if hasattr(array, "devices") and {device.platform for device in array.devices()} != {"cpu"}:
            raise UnsupportedError(
                "a jax array on an accelerator: jax lets no other library write its memory; move it to the "
                "CPU, or to torch by torch.from_dlpack(array)"
            )
        return super().read(array) if isinstance(array, self.np.ndarray) else array

    def half(self, q):
        # Results in bfloat16 are numpy's, which DLPack sees as 16 bits.
        return "bf16" if q.dtype.name == "bfloat16" else None

    def copy(self, array):
        return self.np.array(array)

    def give(self, array):
        return self.jax.numpy.asarray(array)


_FACES = {}


def _face(kind):
    if kind not in _FACES:
        _FACES[kind] = Arrays(kind())
    return _FACES[kind]


def numpy_face():
    return _face(_Numpy)


def cupy_face():
    return _face(_Cupy)


def jax_face():
    return _face(_Jax)


class Arrays:
    """A face: what `fa_attn.interface` asks of a library."""

    has_autograd = False

    def __init__(self, library):
        self.library = library

    def attention(self, q, k, v, scale, causal, window, softcap, deterministic, extras):
        """(out, lse); `deterministic` is about gradients, which a library with autograd computes."""
        del deterministic
        lib = self.library
        # Rows that no sequence has are 0.
        make = lib.empty if extras is None else lib.zeros
        out = make((*q.shape[:-1], v.shape[-1]), q)
        lse = lib.floats(_lse_shape(q), q)
        if extras is not None:
            lse[...] = float("-inf")
            extras = (*map(lib.read, extras[:7]), *extras[7:])
        _core.forward(
            *map(lib.read, (q, k, v, out)),
            lse,
            scale,
            causal,
            window,
            softcap,
            extras,
            lib.stream(q),
            lib.allocate,
            lib.half(q),
        )
        return lib.give(out), lib.give(lse)

    def packed_attention(self, qkv, axis, *options):
        """`attention` of q, k and v in one array along `axis`."""
        return self.attention(*self.unstack(qkv, axis), *options)

    def backward(self, dout, q, k, v, out, lse, scale, causal, window, softcap, deterministic, extras):
        """(dq, dk, dv, dsinks or None)."""
        lib = self.library
        make = lib.empty if extras is None else lib.zeros
        dq, dk, dv = (make(x.shape, x) for x in (q, k, v))
        dsinks = None
        if extras is not None:
            dsinks = lib.floats(q.shape[-2:-1], q) if extras[6] is not None else None
            extras = (*map(lib.read, extras[:7]), *extras[7:])
        arrays = map(lib.read, (dout, q, k, v, out, lse, dq, dk, dv))
        _core.backward(
            *arrays,
            dsinks,
            scale,
            causal,
            window,
            softcap,
            deterministic,
            extras,
            lib.stream(q),
            lib.allocate,
            lib.half(q),
        )
        return lib.give(dq), lib.give(dk), lib.give(dv), None if dsinks is None else lib.give(dsinks)

    def append(self, append):
        """Appends to the caches in place; (q turned, or as it is, lengths afterwards)."""
        lib = self.library
        if isinstance(lib, _Jax):
            raise UnsupportedError(
                "jax arrays cannot be appended to in place: use numpy or torch for the cache"
            )
        q, used = append.q, append.used_k
        after = self.ints(0, used.shape[0], q)
        turned = None
        if append.cos is not None:
            turned = lib.copy(q)
        arrays = map(lib.read, (append.k, append.v, append.k_cache, append.v_cache))
        queries = (None, None) if turned is None else (lib.read(q), lib.read(turned))
        dropped = _core.append(
            *arrays,
            *queries,
            *map(lib.read, (append.cos, append.sin)),
            append.interleaved,
            append.following,
            append.cu_new,
            append.max_new,
            used,
            append.page_table,
            append.cu_q,
            append.max_q,
            after,
            lib.stream(q),
            lib.half(q),
        )
        if dropped:
            raise InputError(
                f"{dropped} rows have no place: beyond the cache's room, in a page that does not exist, or "
                "at a position beyond rotary_cos; the others are written"
            )
        return (q if turned is None else turned), after

    def ints(self, value, count, like):
        return self.library.ints(value, count, like)

    def differences(self, starts):
        return starts[1:] - starts[:-1]

    def unstack(self, array, axis):
        return self.library.unstack(array, axis)

    def select(self, table, rows):
        return table[rows]

    def as_column(self, array):
        return array.reshape(-1, 1)


def _lse_shape(q):
    """(batch, heads, seqlen) of padded queries, (heads, total) of packed ones."""
    *outer, rows, heads, _ = q.shape
    return (*outer, heads, rows)
