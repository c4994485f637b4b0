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



def _refuse_another():
    """Raises an ImportError where flash-attn itself is installed beside the distribution of these modules, whose
    files then are partly the one's and partly the other's."""
    named = {"flash-attn": [], "fa-attn-shim": []}
    for found in _distributions():
        name = (found.metadata["Name"] or "").lower().replace("_", "-")
        if name in named:
            named[name].append(found)
    if not named["fa-attn-shim"]:
        return
    for found in named["flash-attn"]:
        if not found.version.endswith("+fa"):
            raise ImportError(
                f"flash-attn {found.version} and fa-attn-shim, which stands in for it, are both installed: "
                "`pip uninstall fa-attn-shim` and reinstall flash-attn, or `pip uninstall flash-attn` and "
                "reinstall fa-attn-shim"
            )


_refuse_another()

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
