"""The functions on arrays without autograd: numpy, cupy, jax, and others through numpy."""

import importlib
from reprlib import repr as short

from . import _core
from ._checks import (
    LARGEST,
    array,
    capacity_of,
    check_cache_rows,
    check_no_overlap,
    check_out,
    check_pages,
    check_within_cache,
    int32,
)
from ._codes import is_per_row
from ._core import InputError, InputTypeError, UnsupportedError, dropout_bits
from ._dropout import halves
from ._latents import Latents, with_scales
from ._nvrtc import find_nvrtc
from ._options import Extras

# Candidates that are tried before two arrays count as overlapping.
_OVERLAP_WORK = 10_000


class _Numpy:
    """Arrays in the CPU's memory."""

    def __init__(self):
        self.np = importlib.import_module("numpy")

    def read(self, array):
        """The array in a form that the extension module reads."""
        if type(array) is not self.np.ndarray:
            return self.written(array)
        return array if self.is_read(array) else array.copy()

    def is_read(self, array):
        """Whether the extension module takes an array where it lies: rows in any order but from the last to
        the first, of whole elements at their own alignment."""
        flags, size = array.flags, array.itemsize
        if flags.c_contiguous and flags.aligned:
            return True
        return flags.aligned and all(stride >= 0 and stride % size == 0 for stride in array.strides)

    def written(self, array):
        """An array in which the module writes, or another library's."""
        if type(array).__module__.startswith("numpy.ma"):
            raise InputTypeError("an array is masked: attention has no mask of single elements, fill it")
        if getattr(array, "requires_grad", False):
            kind = type(array).__name__
            raise InputTypeError(
                f"a {kind} that requires a gradient is beside arrays that have none: give all as {kind}, or "
                "detach it"
            )
        return array

    def empty(self, shape, like, dtype=None):
        return self.np.empty(shape, like.dtype if dtype is None else dtype)

    def zeros(self, shape, like, dtype=None):
        return self.np.zeros(shape, like.dtype if dtype is None else dtype)

    def floats(self, shape, like):
        return self.np.empty(shape, self.np.float32)

    def ints(self, value, count, like):
        return self.np.full((count,), value, self.np.int32)

    def copy(self, array):
        return array.copy()

    def stream(self, like):
        return None

    allocate = None
    counts_on_host = True

    def give(self, array):
        return array

    def read_by_program(self, array):
        """An array in a type that programs read: as tracing declares those that they do not."""
        array = self.host(array)
        kinds = {"float64": "float32", "int64": "int32", "int16": "int32", "int8": "int32"}
        kind = kinds.get(array.dtype.name, array.dtype)
        if array.dtype.name == "bool":
            array, kind = array.view(self.np.uint8), self.np.uint8
        if min(array.strides, default=0) < 0:
            array = array.copy()
        return array.astype(kind, copy=False)

    def kept(self, extents, threshold, rng_state):
        """The bits that dropout keeps."""
        if rng_state is None:
            raise InputError("dropout_p without rng_state: give (seed, offset), numpy has no state to take")
        batch, heads, rows, keys = extents
        bits = self.np.empty((batch, heads, rows, -(-keys // 32)), self.np.int32)
        dropout_bits(bits, None, (*halves(rng_state), threshold), None)
        return bits

    def packed_bits(self, mask):
        mask = self.host(mask)
        if mask.shape[-1] == 1:
            return self.np.where(mask, -1, 0).astype(self.np.int32)
        mask = self.np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % 32)])
        return self.np.packbits(mask, axis=-1, bitorder="little").view(self.np.int32)

    def contiguous(self, array):
        return self.np.ascontiguousarray(array) if isinstance(array, self.np.ndarray) else array

    def unstack(self, array, axis):
        return [array[(slice(None),) * axis + (i,)] for i in range(array.shape[axis])]

    def overlap(self, one, other):
        """Whether two arrays have elements in common; True where that would take long to find out. Those of
        another library are taken to have none."""
        if not isinstance(other, self.np.ndarray):
            return False
        try:
            return self.np.shares_memory(one, other, max_work=_OVERLAP_WORK)
        except RuntimeError:
            return True

    def host(self, array):
        """An array in the CPU's memory, as numpy's."""
        is_own = isinstance(array, self.np.ndarray) or not hasattr(array, "__dlpack__")
        return self.np.asarray(array) if is_own else self.np.from_dlpack(array)


class _Cupy(_Numpy):
    """Arrays of cupy, on its current stream."""

    def __init__(self):
        self.np = importlib.import_module("cupy")
        find_nvrtc()

    def stream(self, like):
        return self.np.cuda.get_current_stream(like.device.id).ptr

    def overlap(self, one, other):
        has_both = isinstance(other, self.np.ndarray) and one.size > 0 and other.size > 0
        return has_both and self.np.may_share_memory(one, other)

    def is_read(self, array):
        return array.flags.c_contiguous or min(array.strides) >= 0

    # Not in host memory, where nothing is checked: lengths stay on the GPU.
    counts_on_host = False

    def host(self, array):
        return self.np.asarray(array)

    def allocate(self, count, zero):
        make = self.np.zeros if zero else self.np.empty
        return make((count,), self.np.uint8)


class _Jax(_Numpy):
    """Arrays of jax in the CPU's memory: results are allocated by numpy and handed over."""

    def __init__(self):
        super().__init__()
        self.jax = importlib.import_module("jax")

    def read(self, array):
        return super().read(array) if isinstance(array, self.np.ndarray) else array

    written = read

    def copy(self, array):
        return self.np.array(array)

    def host(self, array):
        # From a GPU's memory as well.
        return self.np.asarray(array)

    def give(self, array):
        # Where jax has a GPU, its arrays are made there by default.
        with self.jax.default_device(self.jax.devices("cpu")[0]):
            return self.jax.numpy.asarray(array)

    def contiguous(self, array):
        # jax's own arrays are contiguous.
        return array


_FACES = {}


def _face(kind, arrays=None):
    key = kind, arrays
    if key not in _FACES:
        _FACES[key] = (arrays or Arrays)(kind())
    return _FACES[key]


def numpy_face():
    return _face(_Numpy)


def cupy_face():
    return _face(_Cupy)


def jax_face():
    return _face(_Jax, _JaxArrays)


def lent_face():
    return _face(_Numpy, _LentArrays)


class Arrays(Latents):
    """What `fa_attn.interface` needs from an array library."""

    has_autograd = False
    # Whether arrays are lent to numpy, which results are then of.
    lends = False

    def __init__(self, library):
        self.library = library

    def attention(
        self,
        q,
        k,
        v,
        options,
        extras,
        plans=None,
        *,
        out=None,
        division=None,
        wants_lse=True,
        mods=None,
    ):
        """(out, lse); `options`: the call's `CallOptions`, `extras`: its `Extras` or None. `plans`: work
        plans that other calls have made, to which this one adds its own. `out`: the array that the result is
        written to. `division`: how the work is divided, where the caller decides it. LSE is computed whether
        it is wanted or not. `mods`: masks and changes of scores of the caller's own."""
        lib = self.library
        if not type(q) is type(k) is type(v):
            array("k", k), array("v", v)
        # Rows that belong to no sequence are 0.
        make = lib.empty if extras is None else lib.zeros
        lse = lib.floats(_lse_shape(q), q)
        shape = (*q.shape[:-1], *v.shape[-1:])
        if out is None:
            out = make(shape, q, self._type_of(q, options))
        else:
            self._check_out(out, q, k, v, options, extras)
            if min(getattr(out, "strides", None) or (0,)) < 0:
                made, lse = self.attention(q, k, v, options, extras, plans, division=division, mods=mods)
                return self.stored(made, out), lse
            out = lib.written(out)
        if extras is not None:
            lse[...] = float("-inf")
            extras = self.beside(extras)
        _core.forward(
            *map(lib.read, (q, k, v)),
            out,
            lse,
            options,
            extras,
            lib.stream(q),
            lib.allocate,
            plans,
            division,
            self.programs(mods),
        )
        return lib.give(out), lib.give(lse)

    def beside(self, extras):
        """The extra arrays (lengths, tables, slopes, sinks) as the extension module reads them:
        contiguous."""
        lib = self.library
        arrays = (None if x is None else lib.contiguous(lib.read(x)) for x in extras[:-2])
        return Extras(*arrays, *extras[-2:])

    def programs(self, mods):
        """A call's programs as the extension module takes them."""
        if mods is None:
            return None
        return mods.with_arrays(map(self.library.read_by_program, mods.arrays)).programs

    def narrow(self, array):
        return array

    @property
    def codes(self):
        """The quantisers, which need numpy."""
        return importlib.import_module("._numpy_codes", __package__)

    def floats32(self, array):
        return array.astype("float32")

    def kept(self, q, extents, threshold, rng_state):
        """The bits that dropout keeps, of arrays in host memory."""
        if not self.is_in_host_memory(q):
            raise UnsupportedError("dropout_p with arrays of this library on a GPU: give those of torch")
        return self.library.kept(extents, threshold, rng_state)

    def packed_bits(self, mask):
        """A mask's bits along the last axis, in words of 32, the lowest first."""
        return self.library.packed_bits(mask)

    def packed_attention(self, qkv, axis, *options, division=None, wants_lse=True, mods=None):
        """`attention` of q, k and v in one array along `axis`."""
        return self.attention(*self.unstack(qkv, axis), *options, division=division, mods=mods)

    def backward(self, dout, q, k, v, out, lse, options, extras, dlse=None):
        """(dq, dk, dv, dsinks or None)."""
        lib = self.library
        array("k", k), array("v", v)
        make = lib.empty if extras is None else lib.zeros
        # Of one type, or the module refuses them.
        dq, dk, dv = (make(tuple(x.shape), q) for x in (q, k, v))
        dsinks = None
        if extras is not None:
            dsinks = lib.floats(q.shape[-2:-1], q) if extras.sinks is not None else None
            extras = self.beside(extras)
        arrays = (*map(lib.read, (dout, q, k, v, out)), lib.contiguous(lib.read(lse)), dq, dk, dv)
        dlse = None if dlse is None else lib.contiguous(lib.read(dlse))
        _core.backward(
            *arrays,
            dsinks,
            options,
            extras,
            lib.stream(q),
            lib.allocate,
            dlse,
        )
        return lib.give(dq), lib.give(dk), lib.give(dv), None if dsinks is None else lib.give(dsinks)

    def _type_of(self, q, options):
        """The type of out: q's, or the one that the options name."""
        if options.out_dtype is None:
            return q.dtype
        # That of codes is of the same package as bfloat16.
        is_wide = options.out_dtype == "f32"
        return self.library.np.dtype("float32" if is_wide else importlib.import_module("ml_dtypes").bfloat16)

    def _check_out(self, out, q, k, v, options, extras):
        check_out(out, (*q.shape[:-1], *v.shape[-1:]), self._type_of(q, options))
        check_no_overlap(out, q, k, v, extras, self.library.overlap)

    def check(self, q, k, v, options, extras, out):
        """Checks what `attention` is about to be given, without computing anything."""
        lib = self.library
        if out is not None:
            self._check_out(out, q, k, v, options, extras)
        extras = None if extras is None else self.beside(extras)
        _core.check_forward(*map(lib.read, (q, k, v)), options, extras, lib.stream(q))

    def decoded(self, *_):
        # There is no shorter way.
        return None

    def bits(self, array):
        """Codes as bytes."""
        name = getattr(array.dtype, "name", None) or str(array.dtype)
        return array.view("uint8") if name == "float8_e4m3fn" else array

    def out_of_codes(self, array):
        """The type of out where q is codes: FlashAttention's where there is such a type."""
        return "f32" if str(array.dtype) == "uint8" else "bf16"

    def expanded(self, array, shape):
        array = self.library.host(array)
        return self.library.np.broadcast_to(array.reshape(1) if array.size == 1 else array, shape)

    def refuse_gradient(self, name, array):
        # There are none without autograd.
        pass

    def is_cast(self, *arrays):
        """Whether arrays become of one type."""
        return False

    def cut_off(self, q, k, v, out):
        return q

    def refused(self, results, *arrays):
        return results

    def contiguous(self, array):
        return self.library.contiguous(array)

    def host(self, array):
        """The array where its elements can be checked; None in a GPU's memory."""
        return self.library.host(array) if self.is_in_host_memory(array) else None

    def append(self, append):
        """Appends to the caches in place; returns (q, rotated where there are tables, and the lengths
        afterwards)."""
        lib = self.library
        q = append.q
        used, table, *starts = (
            None if x is None else lib.contiguous(x)
            for x in (append.used_k, append.page_table, append.cu_new, append.cu_q)
        )
        after = self.ints(0, used.shape[0], q)
        descales = (append.k_descale, append.v_descale)
        own = [None if x is None else lib.contiguous(x) for x in descales]
        rotated = None
        if append.cos is not None:
            rotated = lib.copy(q)
        arrays = (lib.read(append.k), lib.read(append.v))
        arrays += (lib.written(append.k_cache), lib.written(append.v_cache))
        tables = (None if x is None else lib.read(lib.contiguous(x)) for x in (append.cos, append.sin))
        queries = (None, None) if rotated is None else (lib.read(q), lib.read(rotated))
        dropped = _core.append(
            *arrays,
            *queries,
            *tables,
            append.interleaved,
            append.options.has_mask,
            starts[0],
            append.max_new,
            used,
            table,
            starts[1],
            append.max_q,
            after,
            *own,
            lib.stream(q),
        )
        for x, made in zip(descales, own):
            # Of a view, as within pages, the rows that are written are those of a copy.
            if is_per_row(x) and made is not x:
                x[...] = made
        if dropped:
            raise InputError(
                f"{dropped} rows have no place: beyond the cache, in a page that does not exist, or "
                "at a position beyond rotary_cos; the others are written"
            )
        return (q if rotated is None else rotated), after

    def ints(self, value, count, like):
        return self.library.ints(value, count, like)

    def differences(self, starts):
        return starts[1:] - starts[:-1]

    def merge(self, outs, lses, sinks, dtype):
        """(out, lse); see `fa_attn.interface.merge`."""
        lib = self.library
        try:
            out = lib.empty(outs[0].shape, outs[0], dtype)
        except (TypeError, ValueError):
            raise InputError(f"dtype is {short(dtype)}: it must be float32, float16 or bfloat16") from None
        lse = lib.floats(lses[0].shape, outs[0])
        parts = [lib.read(part) for part in outs]
        lses = [lib.contiguous(lib.read(part)) for part in lses]
        sinks = None if sinks is None else lib.contiguous(lib.read(sinks))
        _core.merge(parts, lses, out, lse, sinks, lib.stream(outs[0]))
        return lib.give(out), lib.give(lse)

    def without_padding(self, k_cache, v_cache, leftpad, used, table):
        """The cache seen without the padding before each sequence: (k, v, cu_seqlens_k or None, rows in use,
        page table or None)."""
        np, host = self.library.np, self.library.host
        leftpad, used = host(leftpad), host(used)
        table = None if table is None else host(table)
        capacity = capacity_of(k_cache, table)
        rows, page = k_cache.shape[:2]
        if self.library.counts_on_host:
            check_within_cache("cache_leftpad", leftpad, capacity)
            check_within_cache("cache_seqlens", used, capacity)
            if table is not None:
                check_pages(table, leftpad, used, page, rows, np.arange(table.shape[1]))
        # On a GPU what lies beyond the cache is cut off, so that no key of another sequence is read.
        leftpad = np.clip(leftpad, 0, capacity)
        used = np.maximum(np.clip(used, 0, capacity) - leftpad, 0)
        # Copied where the cache is not contiguous.
        flat = [x.reshape(rows * page, *x.shape[2:]) for x in (k_cache, v_cache)]
        if table is None:
            begins = np.arange(rows, dtype=np.int32) * page + leftpad
            starts = np.append(begins, rows * page).astype(np.int32)
            return (*flat, starts, used.astype(np.int32), None)
        # Pages of one row, so that a sequence may begin anywhere.
        places = table[:, :, None].astype(np.int64) * page + np.arange(page)
        # Entries that are not in use may hold anything: what is no page is kept within int32's range.
        places = np.clip(places.reshape(len(table), table.shape[1] * page), -1, LARGEST)
        columns = np.minimum(np.arange(places.shape[1]) + leftpad[:, None], places.shape[1] - 1)
        table = np.ascontiguousarray(np.take_along_axis(places, columns, 1).astype(np.int32))
        return (*(x[:, None] for x in flat), None, used.astype(np.int32), table)

    def unstack(self, array, axis):
        return self.library.unstack(array, axis)

    def side_by_side(self, *arrays):
        """The columns of several arrays in one."""
        return self.library.np.concatenate(arrays, -1)

    def swapped(self, array):
        """The array with its last two axes exchanged, contiguous, as the extension module reads it."""
        return self.library.contiguous(array.swapaxes(-1, -2))

    def stored(self, values, out):
        """`out`, after writing these values to it."""
        try:
            out[...] = values
        except ValueError as error:
            raise InputError(f"out cannot be written: {error}") from None
        return out

    def table_of_rows(self, index, rows, table):
        """The page table of the sequences whose rows in the cache (of `rows` rows), or in `table`, are in
        `index`. Without a table each row of the cache is a page."""
        int32("cache_batch_idx", index)
        if self.is_in_host_memory(index):
            check_cache_rows(self.library.host(index), rows, table)
        return index.reshape(-1, 1) if table is None else table[index]

    def is_in_host_memory(self, array):
        return array.__dlpack_device__()[0] == 1


class _LentArrays(Arrays):
    """Arrays of other libraries in the CPU's memory, read as numpy's; results are numpy's."""

    lends = True

    def attention(self, q, k, v, *others, out=None, **options):
        out = None if out is None else self._lent(out)
        return super().attention(*map(self._lent, (q, k, v, *others)), out=out, **options)

    def packed_attention(self, stacked, *others, **options):
        return super().packed_attention(self._lent(stacked), *others, **options)

    def unstack(self, stacked, axis):
        return super().unstack(self._lent(stacked), axis)

    def backward(self, *arguments):
        return super().backward(*map(self._lent, arguments))

    def check(self, *_):
        # `append` refuses all.
        pass

    def append(self, append):
        raise UnsupportedError("appending in place: use numpy or torch for the cache")

    def differences(self, starts):
        return super().differences(self._lent(starts))

    def side_by_side(self, *arrays):
        return super().side_by_side(*map(self._lent, arrays))

    def merge(self, outs, lses, sinks, dtype):
        own_outs, own_lses, sinks = map(self._lent, (tuple(outs), tuple(lses), sinks))
        for lent, own in ((outs, own_outs), (lses, own_lses)):
            if dtype == lent[0].dtype:
                # Under numpy's name.
                dtype = own[0].dtype
        return super().merge(own_outs, own_lses, sinks, dtype)

    def without_padding(self, *arrays):
        return super().without_padding(*map(self._lent, arrays))

    def table_of_rows(self, *arguments):
        return super().table_of_rows(*map(self._lent, arguments))

    def _lent(self, value):
        if isinstance(value, tuple):
            return _mapped(self._lent, value)
        np = self.library.np
        if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
            return value
        try:
            return np.from_dlpack(value)
        except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise InputError(f"{kind} cannot be lent to numpy: {error}; convert it") from None


class _JaxArrays(Arrays):
    """jax's arrays cannot be written and jax exposes no stream. Arrays on a GPU are lent to torch and results
    handed back by DLPack, each library waiting for the other's stream; nothing is copied."""

    def attention(self, q, *others, out=None, division=None, wants_lse=True, mods=None):
        if out is not None:
            raise UnsupportedError(_UNWRITTEN)
        if _is_traced(q, *others, mods):
            # The work plans of other calls are behind the extras.
            return self._traced().traced_attention(q, *others[:4], division, mods)
        if _is_on_gpu(q):
            return self._by_torch("attention", q, *others, division=division, mods=mods)
        return super().attention(q, *others, division=division, mods=mods)

    def _traced(self):
        return importlib.import_module("fa_attn.jax")

    @property
    def codes(self):
        return importlib.import_module("._jax_codes", __package__)

    def bits(self, array):
        # Bytes have no gradients that could be refused.
        return array if _is_traced(array) else super().bits(array)

    def expanded(self, array, shape):
        np = self.library.jax.numpy
        return np.broadcast_to(array.reshape(1) if array.size == 1 else array, shape)

    def chosen(self, indices, rows, lengths):
        np = self.library.jax.numpy
        seen = (indices >= 0) & (indices < rows)
        if lengths is not None:
            seen &= np.arange(indices.shape[1]) < lengths[:, None]
        order = np.argsort(~seen, axis=1, stable=True)
        table = np.take_along_axis(np.where(seen, indices, 0), order, 1)
        return table.astype(np.int32), seen.sum(1, dtype=np.int32)

    def repeated(self, lengths, times):
        return self.library.jax.numpy.repeat(lengths, times)

    # jax has no longer integers by default.
    _index = "int32"

    @property
    def _operations(self):
        return self.library.jax.numpy

    def _own(self, array):
        return self.library.jax.numpy.asarray(array)

    def _of_bytes(self, name, cache, form):
        # jax's own arrays are contiguous.
        pages, page, _, width = cache.shape
        if form.scale_bytes != 1:
            return cache[:, :, 0], None
        return with_scales(cache.reshape(pages, page * width), page, form)

    def largest_scores(self, q, rows, table, used, scale):
        np = self.library.jax.numpy
        if not (rows.shape[0] and table.shape[1]):
            return np.full(q.shape[:2], -np.inf, np.float32)
        keys = rows[table].astype(np.float32)
        scores = np.einsum("thd,tjd->thj", q.astype(np.float32), keys) * scale
        is_seen = np.arange(table.shape[1]) < used[:, None]
        return np.where(is_seen[:, None], scores, -np.inf).max(-1)

    def sunk(self, out, lse, sinks):
        np = self.library.jax.numpy
        is_blind = np.isneginf(lse)
        above = np.where(is_blind, 0.0, lse) - np.asarray(sinks, np.float32)[:, None]
        share = np.where(is_blind, 0.0, self.library.jax.nn.sigmoid(above))
        return (out.astype(np.float32) * np.swapaxes(share, -1, -2)[..., None]).astype(out.dtype)

    def without_blind(self, lse):
        np = self.library.jax.numpy
        return np.where(np.isneginf(lse), np.inf, lse)

    def backward(self, dout, *others):
        if _is_traced(dout, *others):
            return self._traced().traced_backward(dout, *others)
        if _is_on_gpu(dout):
            return self._by_torch("backward", dout, *others)
        return super().backward(dout, *others)

    def merge(self, outs, lses, sinks, dtype):
        if _is_traced(tuple(outs), tuple(lses), sinks):
            return self._traced().traced_merge(outs, lses, sinks, dtype)
        if _is_on_gpu(outs[0]):
            dtype = getattr(importlib.import_module("torch"), self.library.np.dtype(dtype).name)
            return self._by_torch("merge", tuple(outs), tuple(lses), sinks, dtype)
        return super().merge(outs, lses, sinks, dtype)

    def side_by_side(self, *arrays):
        return self.library.jax.numpy.concatenate(arrays, -1)

    def stored(self, values, out):
        raise UnsupportedError(_UNWRITTEN)

    def kept(self, q, extents, threshold, rng_state):
        bits = self._traced().kept_bits(extents, threshold, rng_state)
        return bits if _is_traced(q, bits) else self.library.np.asarray(bits)

    def packed_bits(self, mask):
        return self._traced().packed_bits(mask) if _is_traced(mask) else super().packed_bits(mask)

    def is_in_host_memory(self, array):
        return not _is_traced(array) and not _is_on_gpu(array)

    def check(self, *_):
        # `append` refuses all.
        pass

    def append(self, append):
        raise UnsupportedError("jax arrays cannot be appended to in place: use numpy or torch for the cache")

    def _by_torch(self, name, *arguments, **options):
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            raise UnsupportedError(
                "a jax array on a GPU: jax lets no other library write its memory; install torch with CUDA, "
                "which lends it, or move the array to the CPU"
            ) from None
        face = importlib.import_module("fa_attn.torch")
        jax, np = self.library.jax, self.library.np
        device = None

        def lent(value):
            nonlocal device
            if isinstance(value, jax.Array):
                tensor = torch.from_dlpack(value)
                device = tensor.device if device is None else device
                return tensor
            if isinstance(value, tuple):
                return _mapped(lent, value)
            # Lengths that the package itself has computed.
            return torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value

        def handed(value):
            return None if value is None else jax.dlpack.from_dlpack(value.contiguous())

        with torch.no_grad():
            arguments = [*map(lent, arguments)]
            named = {key: lent(value) for key, value in options.items()}
            return tuple(map(handed, getattr(face, name)(*arguments, **named)))


def _mapped(function, values):
    """A tuple of the function's results, a named one by the same names."""
    made = map(function, values)
    return type(values)(*made) if hasattr(values, "_fields") else tuple(made)


_UNWRITTEN = "out: jax arrays cannot be written, leave it out"


def _is_traced(*values):
    """Whether jax traces an array of these or of the tuples among them."""
    tracer = importlib.import_module("jax").core.Tracer
    return any(
        _is_traced(*value) if isinstance(value, tuple) else isinstance(value, tracer) for value in values
    )


def _is_on_gpu(array):
    devices = array.devices() if hasattr(array, "devices") else ()
    return {device.platform for device in devices} - {"cpu"} != set()


def _lse_shape(q):
    """(batch, heads, seqlen) of padded queries, (heads, total) of packed ones."""
    if len(q.shape) < 3:
        need = "(batch, seqlen, heads, head_dim) or (total, heads, head_dim)"
        raise InputError(f"q has the shape {tuple(q.shape)}: it must be {need}")
    *outer, rows, heads, _ = q.shape
    return (*outer, heads, rows)
