"""The functions on arrays without autograd, whose libraries are those of `fa_attn._libraries`."""

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
    refuse_dropped,
)
from ._codes import is_per_row
from ._core import InputError, UnsupportedError
from ._latents import Latents
from ._options import Extras


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
        shape = _out_shape(q, v, options)
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
        check_out(out, _out_shape(q, v, options), self._type_of(q, options))
        check_no_overlap(out, q, k, v, extras, self.library.overlap)

    def check(self, q, k, v, options, extras, out):
        """Checks what `attention` is about to be given, without computing anything."""
        lib = self.library
        if out is not None:
            self._check_out(out, q, k, v, options, extras)
        extras = None if extras is None else self.beside(extras)
        _core.check_forward(*map(lib.read, (q, k, v)), options, extras, lib.stream(q))

    def plain_attention(self, *_, **__):
        # There is no shorter way.
        return None

    plain_packed_attention = plain_attention
    plain_attention_on_cache = plain_attention

    def bits(self, array):
        """Codes as bytes."""
        name = getattr(array.dtype, "name", None) or str(array.dtype)
        return array.view("uint8") if name in ("float8_e4m3fn", "float8_e5m2") else array

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
            append.options.kv_dtype,
            lib.stream(q),
        )
        for x, made in zip(descales, own):
            # Of a view, as within pages, the rows that are written are those of a copy.
            if is_per_row(x) and made is not x:
                x[...] = made
        refuse_dropped(dropped, append.k_cache, append.page_table, append.cos)
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


class LentArrays(Arrays):
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
            return mapped(self._lent, value)
        np = self.library.np
        if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
            return value
        try:
            return np.from_dlpack(value)
        except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise InputError(f"{kind} cannot be lent to numpy: {error}; convert it") from None


def mapped(function, values):
    """A tuple of the function's results, a named one by the same names."""
    made = map(function, values)
    return type(values)(*made) if hasattr(values, "_fields") else tuple(made)


def _out_shape(q, v, options):
    return (*q.shape[:-1], *(columns * options.per_element for columns in v.shape[-1:]))


def _lse_shape(q):
    """(batch, heads, seqlen) of padded queries, (heads, total) of packed ones."""
    if len(q.shape) < 3:
        need = "(batch, seqlen, heads, head_dim) or (total, heads, head_dim)"
        raise InputError(f"q has the shape {tuple(q.shape)}: it must be {need}")
    *outer, rows, heads, _ = q.shape
    return (*outer, heads, rows)
