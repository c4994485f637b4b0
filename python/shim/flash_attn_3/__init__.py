"""Stands in for FlashAttention-3's package, which programs look for before they import `flash_attn_interface`."""

# The version whose functions these are.
__version__ = "3.0.0"
