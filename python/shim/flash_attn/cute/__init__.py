"""Stands in for FlashAttention-4's package flash_attn.cute."""

from .interface import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
