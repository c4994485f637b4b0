"""Rows of latents in codes of 8 bits (`fa_attn._packed_rows`), unpacked by torch's operations on the tensors'
device."""

from __future__ import annotations

import torch

from ._checks import check_pages
from ._core import InputError
from ._latents import ROOM
from ._packed_rows import form_of, one_number, refuse_distance
from ._torch_memory import FLOAT, check_tensor, is_compiling


class PackedRows:
    """A cache (pages, page, 1, bytes of a row) of such rows."""

    def __init__(self, form, cache, dtype, descale):
        self.form, self.dtype, self.descale = form, dtype, descale
        self.pages, self.page, _, width = cache.shape
        cache = cache[:, :, 0]
        if form.scale_bytes == 1:
            # Eight bytes of scales for each row, of which the last is not used.
            between, own, _ = cache.stride()
            if self.page > 1 and own != width:
                refuse_distance(own)
            data = form.data_bytes
            cache = cache.as_strided((self.pages, self.page * width), (between, 1))
            self.rows = cache[:, : self.page * data].unflatten(1, (self.page, data))
            self.scales = cache[:, self.page * data :].unflatten(1, (self.page, 8))
        else:
            self.rows, self.scales = cache, None

    @property
    def shape(self):
        """That of the cache that it stands for."""
        return (self.pages, self.page, 1, self.form.columns)

    def unpacked(self, places=None):
        """Rows by their numbers, (.., columns) for `places` (..); without them the cache, in its shape."""
        if places is None:
            return self._values(self.rows, self.scales)[:, :, None]
        places = places.long()
        at = (places // self.page, places % self.page)
        return self._values(*(None if x is None else _at(x, at) for x in (self.rows, self.scales)))

    def _values(self, rows, scales):
        columns, codes, group, scale_bytes = self.form
        values = rows[..., :codes].view(torch.float8_e4m3fn).to(FLOAT)
        if not group:
            values = values if self.descale is None else values * self.descale
            return values.to(self.dtype)
        values = values.unflatten(-1, (codes // group, group))
        if scale_bytes == 1:
            exponents = scales[..., : codes // group, None].int()
            values = torch.ldexp(values, exponents - 127).masked_fill(exponents == 255, torch.nan)
            turned = rows[..., codes:]
        else:
            behind = codes + 4 * (codes // group)
            values = values * rows[..., codes:behind].view(FLOAT)[..., None]
            turned = rows[..., behind:]
        turned = turned.view(torch.bfloat16).to(self.dtype)
        return torch.cat([values.flatten(-2).to(self.dtype), turned], -1)


def _at(rows, at):
    """Rows of bytes, copied in words of eight where they lie on multiples of them."""
    if not is_compiling():
        distances = (*rows.stride()[:-1], rows.storage_offset(), rows.shape[-1])
        if not any(distance % 8 for distance in distances):
            return rows.view(torch.int64)[at].view(torch.uint8)
    return rows[at]


def packed_rows(name, cache, dtype, descale):
    """The cache `name` of packed rows, which become numbers of `dtype`. `descale`: float32, of one element,
    what the codes of rows without scales are multiplied by."""
    check_tensor(name, cache)
    form = form_of(name, str(cache.dtype), cache.shape, descale)
    if cache.stride(-1) != 1:
        raise InputError(f"{name} has bytes of a row at distances of {cache.stride(-1)}: copy it")
    return PackedRows(form, cache.detach().view(torch.uint8), dtype, _number("descale_k", descale))


def _number(name, descale):
    """A descale of one element, or None."""
    if descale is None:
        return None
    check_tensor(name, descale)
    one_number(name, str(descale.dtype), descale.shape, descale.numel())
    return descale.detach().reshape(())


def places_of(table, cache):
    """The numbers of the rows of each sequence's pages, (batch, rows). Entries that are not in use may hold
    anything: what is no page becomes one."""
    pages, page, *_ = cache.shape
    first = table.long().clamp(0, max(pages - 1, 0)) * page
    return (first[..., None] + torch.arange(page, device=table.device)).flatten(1)


def gathered(cache, table, starts, first, total, dtype):
    """Rows of sequences by their table, end to end: `total` rows, each sequence's from its row `first` on
    between its `starts`, as numbers of `dtype` (None for the cache's); 0 behind the last. Rows of codes are
    unpacked in parts."""
    pages, page, *_ = cache.shape
    rows = torch.arange(total, device=table.device)
    of_row = torch.searchsorted(starts[1:].contiguous(), rows, right=True).clamp(max=table.shape[0] - 1)
    at = rows - starts[of_row] + (0 if first is None else first[of_row])
    own = table[of_row, (at // page).clamp(0, table.shape[1] - 1)].clamp(0, pages - 1)
    places = own.long() * page + at % page
    if isinstance(cache, PackedRows):
        step = max(1, ROOM // (cache.form.columns * FLOAT.itemsize))
        made = [cache.unpacked(part)[:, None] for part in places.split(step)]
        made = made[0] if len(made) == 1 else torch.cat(made)
    else:
        made = cache[places // page, places % page]
        made = made if dtype is None else made.to(dtype)
    return made.masked_fill((rows >= starts[-1])[:, None, None], 0.0)


def check_table(table, used, cache):
    """Checks the entries in use of a page table in host memory."""
    pages, page, *_ = cache.shape
    check_pages(table, torch.zeros_like(used), used, page, pages, torch.arange(table.shape[1]))


def numbers_of(q, descale):
    """A q of e4m3 codes as bfloat16."""
    descale = _number("descale_q", descale)
    values = q.detach().view(torch.float8_e4m3fn).to(FLOAT)
    return (values if descale is None else values * descale).to(torch.bfloat16)
