"""Rows of latents in codes of 8 bits as servers pack them, unpacked by torch's operations on the tensors'
device: the columns of the latent are e4m3 codes times a scale for each group of them, those that rotary
embedding turned are bfloat16."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import _core
from ._checks import check_pages
from ._torch_memory import FLOAT, check_tensor, is_compiling


class _Form(NamedTuple):
    """A row by its bytes. `group`: columns that share a scale of `scale_bytes`: a float32 behind the row's
    codes, or a power of two in e8m0 behind all rows of the page; 0 where one scale is given for all."""

    columns: int
    codes: int
    group: int
    scale_bytes: int


# DeepSeek-V3.2's, DeepSeek-V4's, and rows of codes alone.
_FORMS = {656: _Form(576, 512, 128, 4), 584: _Form(512, 448, 64, 1), 576: _Form(576, 576, 0, 0)}
_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


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
                raise _core.InputError(
                    f"k_cache has rows of 584 bytes at distances of {own}: those of a page lie end to end"
                )
            data = form.codes + 2 * (form.columns - form.codes)
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
    if cache.dtype not in _BYTES:
        raise _core.InputError(
            f"{name} holds {cache.dtype}: with is_fp8_kvcache it must be float8_e4m3fn or uint8, the bytes "
            "of its rows"
        )
    form = _FORMS.get(cache.shape[-1])
    if form is None or cache.shape[2] != 1:
        need = ", ".join(map(str, _FORMS))
        raise _core.InputError(
            f"{name} has the shape {tuple(cache.shape)}: with is_fp8_kvcache it must be (pages, page, 1, "
            f"bytes of a row), of which there are {need}"
        )
    if cache.stride(-1) != 1:
        raise _core.InputError(f"{name} has bytes of a row at distances of {cache.stride(-1)}: copy it")
    if descale is not None and form.group:
        raise _core.InputError(
            f"descale_k: rows of {cache.shape[-1]} bytes of {name} have scales of their own, leave it out"
        )
    return PackedRows(form, cache.detach().view(torch.uint8), dtype, one_number("descale_k", descale))


def one_number(name, descale):
    """A descale of one element, or None."""
    if descale is None:
        return None
    check_tensor(name, descale)
    if descale.dtype is not FLOAT or descale.numel() != 1:
        shape = tuple(descale.shape)
        raise _core.InputError(f"{name} is {descale.dtype} {shape}: it must be float32 of one element")
    return descale.detach().reshape(())


def places_of(table, cache):
    """The numbers of the rows of each sequence's pages, (batch, rows). Entries that are not in use may hold
    anything: what is no page becomes one."""
    pages, page, *_ = cache.shape
    first = table.long().clamp(0, max(pages - 1, 0)) * page
    return (first[..., None] + torch.arange(page, device=table.device)).flatten(1)


def check_table(table, used, cache):
    """Checks the entries in use of a page table in host memory."""
    pages, page, *_ = cache.shape
    check_pages(table, torch.zeros_like(used), used, page, pages, torch.arange(table.shape[1]))


def numbers_of(q, descale):
    """A q of e4m3 codes as bfloat16."""
    descale = one_number("descale_q", descale)
    values = q.detach().view(torch.float8_e4m3fn).to(FLOAT)
    return (values if descale is None else values * descale).to(torch.bfloat16)
