"""Stands in for FlashAttention-2's package, so that its own tests, and programs that import it, run on
`fa_attn`."""

from importlib.metadata import distributions as _distributions

from fa_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

# The version whose functions these are.
__version__ = "2.8.3"


def _refuse_another(*names):
    """Raises an ImportError where one of these is itself installed beside the distribution of these modules, whose
    files then are partly the one's and partly the other's."""
    found = [(x.metadata["Name"] or "", x.version) for x in _distributions()]
    found = [(name.lower().replace("_", "-"), version) for name, version in found]
    if not any(name == "fa-attn-shim" for name, _ in found):
        return
    for name, version in found:
        if name in names and not version.endswith("+fa"):
            raise ImportError(
                f"{name} {version} and fa-attn-shim, which stands in for it, are both installed: "
                f"`pip uninstall fa-attn-shim` and reinstall {name}, or `pip uninstall {name}` and "
                "reinstall fa-attn-shim"
            )


_refuse_another("flash-attn", "flash-attn-4")

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
