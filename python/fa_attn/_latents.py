"""What `fa_attn.flash_mla` needs of arrays other than torch's."""

import importlib
from typing import Any

from ._checks import check_pages
from ._core import InputError
from ._packed_rows import PackedRows, form_of, one_number, refuse_distance

# The most bytes of a copy of rows: work on more is done in parts.
ROOM = 1 << 28


class Latents:
    """Methods of `fa_attn._arrays.Arrays`, whose `library` has the functions of arrays."""

    library: Any

    def chosen(self, indices, rows, lengths):
        """(page table of single rows, rows in use) of `indices` (n, most), of which entries outside of the
        `rows` that there are, and those from `lengths` (n,) on, name none."""
        np, host = self.library.np, self.library.host
        indices = host(indices)
        seen = (indices >= 0) & (indices < rows)
        if lengths is not None:
            seen &= np.arange(indices.shape[1]) < host(lengths)[:, None]
        order = np.argsort(~seen, axis=1, kind="stable")
        table = np.take_along_axis(np.where(seen, indices, 0), order, 1)
        return np.ascontiguousarray(table, np.int32), seen.sum(1).astype(np.int32)

    def rows_of_pages(self, cache, table):
        """(cache, table): a cache (pages, page, heads, columns) as pages of one row, and a table of its rows
        as one of those. Copied where pages do not follow each other."""
        return cache.reshape(-1, 1, *cache.shape[2:]), table

    def packed_rows(self, name, cache, dtype, descale):
        """The cache `name` of packed rows, which become numbers of `dtype`. `descale`: float32, of one
        element, what the codes of rows without scales are multiplied by."""
        cache = self._own(cache)
        form = form_of(name, str(cache.dtype), cache.shape, descale)
        rows, scales = self._of_bytes(name, cache.view("uint8"), form)
        descale = self._number("descale_k", descale)
        dtype = self._named_type(dtype)
        return PackedRows(self._operations, form, cache.shape, rows, scales, _numbers(), dtype, descale)

    def _of_bytes(self, name, cache, form):
        """(rows, scales behind the rows of a page or None), (pages, page, bytes) each, where they lie."""
        pages, page, _, width = cache.shape
        between, own, _, each = cache.strides
        if each != 1:
            raise InputError(f"{name} has bytes of a row at distances of {each}: copy it")
        if form.scale_bytes != 1:
            return cache[:, :, 0], None
        if page > 1 and own != width:
            refuse_distance(own)
        strided = self.library.np.lib.stride_tricks.as_strided
        return with_scales(strided(cache, (pages, page * width), (between, 1)), page, form)

    def _own(self, array):
        """The array as one of the library whose operations unpack rows."""
        return self.library.host(array)

    def _named_type(self, dtype):
        """The library's type of the name of another's."""
        name = getattr(dtype, "__name__", str(dtype)).rpartition(".")[2]
        importlib.import_module("ml_dtypes" if name == "bfloat16" else "numpy")
        return self.library.np.dtype(name)

    def _number(self, name, descale):
        """A descale of one element, or None."""
        if descale is None:
            return None
        descale = self._own(descale)
        one_number(name, str(descale.dtype), descale.shape, descale.size)
        return descale.reshape(())

    def numbers_of(self, q, descale):
        """A q of e4m3 codes as bfloat16, where there is such a type beside theirs."""
        np, descale = self._operations, self._number("descale_q", descale)
        values = np.asarray(_numbers())[self._own(q).view("uint8")]
        values = values if descale is None else values * descale
        is_wide = str(q.dtype) == "uint8"
        return values if is_wide else values.astype(importlib.import_module("ml_dtypes").bfloat16)

    @property
    def _operations(self):
        """The library whose operations unpack rows."""
        return self.library.np

    def places_of(self, table, cache):
        """The numbers of the rows of each sequence's pages, (batch, rows). Entries that are not in use may
        hold anything: what is no page becomes one."""
        np, (pages, page, *_) = self._operations, cache.shape
        table = self._own(table)
        first = np.clip(table, 0, max(pages - 1, 0)).astype(self._index) * page
        return (first[..., None] + np.arange(page, dtype=self._index)).reshape(table.shape[0], -1)

    # The type of rows' numbers.
    _index = "int64"

    def check_table(self, table, used, cache):
        """Checks the entries in use of a page table in host memory."""
        np, (pages, page, *_) = self.library.np, cache.shape
        table, used = self.library.host(table), self.library.host(used)
        check_pages(table, np.zeros_like(used), used, page, pages, np.arange(table.shape[1]))

    def gathered(self, cache, table, starts, first, total, dtype):
        """Rows of sequences by their table, end to end: `total` rows, each sequence's from its row `first` on
        between its `starts`, as numbers of `dtype` (None for the cache's); 0 behind the last."""
        np, (pages, page, *_) = self._operations, cache.shape
        table, starts = self._own(table), self._own(starts)
        rows = np.arange(total, dtype=self._index)
        of_row = np.searchsorted(starts[1:], rows, side="right").clip(0, table.shape[0] - 1)
        at = rows - starts[of_row] + (0 if first is None else self._own(first)[of_row])
        own = table[of_row, (at // page).clip(0, table.shape[1] - 1)].clip(0, pages - 1)
        places = own.astype(self._index) * page + at % page
        if hasattr(cache, "unpacked"):
            made = cache.unpacked(places)[:, None]
        else:
            made = self._own(cache)[places // page, places % page]
            made = made if dtype is None else made.astype(self._named_type(dtype))
        made = np.where((rows < starts[-1])[:, None, None], made, np.zeros((), made.dtype))
        return self.library.give(made)

    def one_after_another(self, arrays):
        """Arrays joined along their first axis."""
        return self._operations.concatenate(arrays)

    def repeated(self, lengths, times):
        return self.library.np.repeat(self.library.host(lengths), times)

    def largest_scores(self, q, rows, table, used, scale):
        """The largest scaled score of each head of q (n, heads, columns) on the first `used` (n,) rows of
        `table` (n, most)."""
        np = self.library.np
        largest = np.full(q.shape[:2], -np.inf, np.float32)
        for index, count in enumerate(used.tolist()):
            if count:
                keys = rows[table[index, :count]].astype(np.float32)
                largest[index] = (q[index].astype(np.float32) @ keys.T * np.float32(scale)).max(-1)
        return self.library.give(largest)

    def sunk(self, out, lse, sinks, like):
        """out (.., rows, heads, columns) in the type of `like`, with a sink in the denominators; lse (..,
        heads, rows) has none."""
        np = self.library.np
        out, lse = self.library.host(out), self.library.host(lse)
        sinks = self.library.host(sinks).astype(np.float32)[:, None]
        is_blind = np.isneginf(lse)
        above = sinks - np.where(is_blind, np.float32(0), lse)
        # exp(88) is the last that float32 holds.
        share = np.where(above > 88, np.float32(0), 1 / (1 + np.exp(np.minimum(above, 88))))
        share = np.where(is_blind, np.float32(0), share).swapaxes(-1, -2)[..., None]
        return self.library.give((out.astype(np.float32) * share).astype(self.library.host(like).dtype))

    def without_blind(self, lse):
        """lse with +inf for rows that see no key."""
        np = self.library.np
        lse = self.library.host(lse)
        return self.library.give(np.where(np.isneginf(lse), np.float32(np.inf), lse))


def _numbers():
    """The number of every e4m3 code, float32."""
    return importlib.import_module("._numpy_codes", __package__).E4M3


def with_scales(data, page, form):
    """(rows, scales) of pages of bytes: of each row eight bytes of scales, of which the last is not used."""
    end = page * form.data_bytes
    rows = data[:, :end].reshape(-1, page, form.data_bytes)
    return rows, data[:, end:].reshape(-1, page, 8)
