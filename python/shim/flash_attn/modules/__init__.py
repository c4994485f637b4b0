"""Stands in for flash_attn.modules: what computes attention alone, without weights."""
