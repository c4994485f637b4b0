"""The quantisers of K and V in torch's operations: those of fa-core, on any device."""

from __future__ import annotations

import torch

from ._codes import _LARGEST_FLOAT, _SMALLEST_NORMAL, broadcast_shape
from ._core import InputError
from ._torch_memory import FLOAT, PLAIN, check_tensor, is_compiling, is_recorded, is_transforming
from ._turned_rows import NEGATED, factor_of, hadamard

# A type that holds the value of every code, and that kernels append rows of.
WIDE = torch.float16
# What queries in codes of e5m2 become, and the result with them.
NUMBERS = torch.bfloat16
# Codes that are numbers of torch's.
FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def quantized(x, codes, largest, axes, descale):
    check_tensor("x", x)
    if not x.is_floating_point() or x.itemsize == 1:
        raise InputError(f"x holds {x.dtype}: it must be floating point, of 16 bits or more")
    values = x.detach().to(FLOAT)
    if descale is None:
        magnitudes = torch.where(torch.isfinite(values), values.abs(), 0.0)
        top = magnitudes.amax(axes) if values.numel() else magnitudes.sum(axes)
        # By a number, CUDA multiplies by its reciprocal.
        descale = (top / torch.full((), largest, device=top.device)).clamp(min=_SMALLEST_NORMAL)
        descale = descale.reshape(1) if descale.dim() == 0 else descale
    check_tensor("descale", descale)
    factor = descale.detach().to(FLOAT).reshape(broadcast_shape(descale, x))
    factor = torch.where(factor == 0, 0.0, (1.0 / factor).clamp(-_LARGEST_FLOAT, _LARGEST_FLOAT))
    values = (values * factor).clamp(-largest, largest)
    if codes in FLOATS:
        return values.to(FLOATS[codes]), descale
    values = values.nan_to_num(0.0).round().to(torch.int8)
    if codes == "int4":
        values = (values[..., ::2] & 15 | values[..., 1::2] << 4).view(torch.uint8)
    return values, descale


def decoded(codes, descale, dtype, kind):
    check_tensor("codes", codes)
    if kind == "int4":
        upper = codes.view(torch.int8)
        codes = torch.stack((upper << 4, upper), -1).flatten(-2) >> 4
    elif codes.dtype is torch.uint8:
        codes = codes.view(FLOATS[kind])
    values = codes.to(FLOAT)
    if descale is not None:
        check_tensor("descale", descale)
        values = values * descale.to(FLOAT).reshape(broadcast_shape(descale, codes))
    return values if dtype is None else values.to(dtype)


def are_descales(x):
    """Whether all values are finite and not negative, as the extension module has it; True where they are not
    read, as on a GPU."""
    if not x.is_cpu or is_compiling() or is_transforming() or is_recorded() or type(x) not in PLAIN:
        return True
    return bool(((x >= 0) & (x < float("inf"))).all())


def scaled(x, descale, starts, group):
    """Queries, or a result, times a descale (heads_kv,) or (batch, heads_kv). `starts`: those of packed
    sequences, or None; `group`: query heads of a K/V head."""
    factor = descale.detach().to(FLOAT)
    if factor.dim() == 2 and factor.stride(0) == 0:
        # One for all sequences, expanded.
        factor = factor[:1]
    factor = factor.repeat_interleave(group, -1)
    if factor.dim() == 2 and starts is None:
        factor = factor[:, None]
    elif factor.dim() == 2 and factor.shape[0] > 1:
        rows = torch.arange(x.shape[0], dtype=starts.dtype, device=x.device)
        of_row = torch.searchsorted(starts[1:].contiguous(), rows, right=True)
        factor = factor[of_row.clamp(max=factor.shape[0] - 1)]
    return (x * factor[..., None]).to(x.dtype)


def encoded(x):
    return quantized(x, "e4m3", 448.0, None, torch.ones(1, device=x.device))[0]


def without_zero_points(codes, scales):
    """int8 and descales of rows of vLLM's int4_per_token_head, beside queries that `turned` turns."""
    check_tensor("codes", codes)
    check_tensor("scales", scales)
    bits = scales.detach().view(torch.int32)
    numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int8)
    descales = (bits & -16).view(FLOAT) * factor_of(2 * codes.shape[-1])
    return numbers - (bits & 15).to(torch.int8)[..., None], descales


def turned(x, back):
    """Rows as vLLM turns them for int4_per_token_head, with their length; `back`: turned back."""
    values, signs = x.to(FLOAT), _signs(x.shape[-1], x.device)
    values = hadamard(values, torch.stack) * signs if back else hadamard(values * signs, torch.stack)
    return values.to(x.dtype)


def _signs(columns, device):
    """-1 for negated columns, else 1: made on the device, since captures refuse copies from the host."""
    words = NEGATED[: -(-columns // 32)]
    words = [torch.full((32,), word, dtype=torch.int64, device=device) for word in words]
    bits = torch.cat(words)[:columns] >> torch.arange(columns, device=device) % 32 & 1
    return 1.0 - 2.0 * bits.to(FLOAT)
