"""FlashAttention-3's module `flash_attn_interface` as of versions 2.8.0 to 2.8.2: today's arguments, and
every result comes with its LSE.

    import flash_attn_interface_2_8 as flash_attn_interface
"""

import functools

from flash_attn_interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

flash_attn_func = functools.partial(flash_attn_func, return_attn_probs=True)
flash_attn_varlen_func = functools.partial(flash_attn_varlen_func, return_attn_probs=True)
