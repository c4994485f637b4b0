"""Attention for numpy, torch and every other array that supports DLPack, forward and backward, on CPUs and
NVIDIA GPUs.

>>> import numpy as np, fa_attn
>>> q = k = v = np.random.default_rng(0).standard_normal((1, 128, 4, 64), dtype=np.float32)
>>> out = fa_attn.flash_attn_func(q, k, v, causal=True)     # (batch, seqlen, heads, head_dim), as q

The functions have FlashAttention's names, arguments and results. Arrays are computed where they are: numpy's
on all cores, torch's on their device and stream, with gradients. What is not supported raises an error that
says what would work.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from ._codes import dequantize_kv, quantize_kv
from ._core import DeviceError, InputError, InputTypeError, UnsupportedError, version
from ._programs import Program
from .interface import (
    flash_attn_backward,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_backward,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    merge,
)
from .planning import Kernels, Plan, Problem, explain, finish_tuning, plan, problem, tune

if TYPE_CHECKING:
    from .flex import BlockMask as BlockMask
    from .flex import create_block_mask as create_block_mask
    from .flex import flex_attention as flex_attention
    from .flex import scaled_dot_product_attention as scaled_dot_product_attention
    from .flex import triangle_attention as triangle_attention
    from .flex import varlen_attn as varlen_attn

__version__ = version()

# Functions of torch, imported when they are first asked for. `__all__` leaves them out, so that
# `from fa_attn import *` works without torch.
_OF_TORCH = (
    "BlockMask",
    "create_block_mask",
    "flex_attention",
    "scaled_dot_product_attention",
    "triangle_attention",
    "varlen_attn",
)


def __getattr__(name: str) -> Any:
    if name not in _OF_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = _import_module("fa_attn.flex")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"fa_attn.{name} takes torch's tensors, and torch is not installed: install it, or give numpy "
            "arrays to flash_attn_func, with mask_mod and score_mod, or jax's to fa_attn.jax",
            name="torch",
        ) from error
    value = globals()[name] = getattr(module, name)
    return value


__all__ = [
    "DeviceError",
    "InputError",
    "InputTypeError",
    "Kernels",
    "Plan",
    "Problem",
    "Program",
    "UnsupportedError",
    "dequantize_kv",
    "explain",
    "finish_tuning",
    "flash_attn_backward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_backward",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "merge",
    "plan",
    "problem",
    "quantize_kv",
    "tune",
]


def __dir__() -> "list[str]":
    return sorted({*globals(), *_OF_TORCH})
