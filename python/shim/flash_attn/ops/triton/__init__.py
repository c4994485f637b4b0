"""Stands in for flash_attn.ops.triton."""
