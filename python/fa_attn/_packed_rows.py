"""Rows of latents in codes of 8 bits as servers pack them: the columns of the latent are e4m3 codes times a
scale for each group of them, those that rotary embedding turned are bfloat16. Here are the forms, and how
arrays of numpy, cupy and jax are unpacked by these libraries' own operations."""

from __future__ import annotations

from typing import NamedTuple

from ._core import LATENT_ROWS, InputError


class Form(NamedTuple):
    """A row by its bytes. `group`: columns that share a scale of `scale_bytes`: a float32 behind the row's
    codes, or a power of two in e8m0 behind all rows of the page; 0 where one scale is given for all."""

    columns: int
    codes: int
    group: int
    scale_bytes: int

    @property
    def data_bytes(self):
        """Of a row without scales that lie behind all rows of the page."""
        return self.codes + 2 * (self.columns - self.codes)


# By the bytes of a row, as fa-core has them: DeepSeek-V3.2's, DeepSeek-V4's, and rows of codes alone.
_FORMS = {size: Form(*form) for size, form in LATENT_ROWS}
_BYTES = ("uint8", "int8", "float8_e4m3fn")


def form_of(name, dtype, shape, descale):
    """The form of the rows of the cache `name`; `descale`: None, or what their codes are multiplied by."""
    if dtype.rpartition(".")[2] not in _BYTES:
        raise InputError(
            f"{name} holds {dtype}: with is_fp8_kvcache it must be float8_e4m3fn or uint8, the bytes of its "
            "rows"
        )
    form = _FORMS.get(shape[-1])
    if form is None or shape[2] != 1:
        need = ", ".join(map(str, _FORMS))
        raise InputError(
            f"{name} has the shape {tuple(shape)}: with is_fp8_kvcache it must be (pages, page, 1, bytes of "
            f"a row), of which there are {need}"
        )
    if descale is not None and form.group:
        raise InputError(
            f"descale_k: rows of {shape[-1]} bytes of {name} have scales of their own, leave it out"
        )
    return form


def refuse_distance(distance):
    raise InputError(
        f"k_cache has rows of 584 bytes at distances of {distance}: those of a page lie end to end"
    )


class PackedRows:
    """A cache (pages, page, ..) of such rows. `np`: the array library; `rows`, and `scales` where they lie
    behind the rows of a page: bytes (pages, page, bytes); `numbers`: that of each code."""

    def __init__(self, np, form, shape, rows, scales, numbers, dtype, descale):
        self.np, self.form, self.dtype, self.descale = np, form, dtype, descale
        self.pages, self.page = shape[:2]
        self.rows, self.scales, self.numbers = rows, scales, np.asarray(numbers)

    @property
    def shape(self):
        """That of the cache that it stands for."""
        return (self.pages, self.page, 1, self.form.columns)

    def unpacked(self, places=None):
        """Rows by their numbers, (.., columns) for `places` (..); without them the cache, in its shape."""
        if places is None:
            return self._values(self.rows, self.scales)[:, :, None]
        at = (places // self.page, places % self.page)
        return self._values(self.rows[at], None if self.scales is None else self.scales[at])

    def _values(self, rows, scales):
        np = self.np
        columns, codes, group, scale_bytes = self.form
        values = self.numbers[rows[..., :codes]]
        if not group:
            return (values if self.descale is None else values * self.descale).astype(self.dtype)
        values = values.reshape(*values.shape[:-1], codes // group, group)
        if scale_bytes == 1:
            exponents = scales[..., : codes // group, None].astype(np.int32)
            # In two steps: 2^-127 is below the normal numbers.
            power = np.minimum(exponents, 254) - 127
            values = values * _power(np, power // 2) * _power(np, power - power // 2)
            values = np.where(exponents == 255, np.float32("nan"), values)
            turned = rows[..., codes:]
        else:
            behind = codes + 4 * (codes // group)
            values = values * _words(np, rows[..., codes:behind], 4)[..., None]
            turned = rows[..., behind:]
        values = values.reshape(*values.shape[:-2], codes).astype(self.dtype)
        # A bfloat16 is the upper half of a float32.
        turned = _words(np, turned, 2)
        return np.concatenate([values, turned.astype(self.dtype)], -1)


def _power(np, exponents):
    """2 to exponents of normal numbers."""
    return ((exponents + 127).astype(np.uint32) << 23).view(np.float32)


def _words(np, data, size):
    """The float32 of each `size` bytes of the last axis: all of their bits, or the upper ones."""
    parts = data.reshape(*data.shape[:-1], data.shape[-1] // size, size).astype(np.uint32)
    first = 32 - 8 * size
    word = parts[..., 0] << first
    for at in range(1, size):
        word = word | parts[..., at] << (first + 8 * at)
    return word.view(np.float32)


def one_number(name, dtype, shape, size):
    """Checks a descale of one element."""
    if dtype.rpartition(".")[2] != "float32" or size != 1:
        raise InputError(f"{name} is {dtype} {tuple(shape)}: it must be float32 of one element")
