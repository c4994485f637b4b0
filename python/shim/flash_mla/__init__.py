"""Stands in for FlashMLA's package."""

from importlib.metadata import distributions as _distributions

_NAMES = {(found.metadata["Name"] or "").lower().replace("_", "-") for found in _distributions()}
if {"flash-mla", "fa-attn-shim"} <= _NAMES:
    raise ImportError(
        "flash-mla and fa-attn-shim, which stands in for it, are both installed: `pip uninstall fa-attn-shim` and "
        "reinstall flash-mla, or `pip uninstall flash-mla` and reinstall fa-attn-shim"
    )

from .flash_mla_interface import *  # noqa: E402, F403
from .flash_mla_interface import __all__ as __all__  # noqa: E402

# The version whose functions these are.
__version__ = "1.0.0"
