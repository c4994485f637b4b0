"""Stands in for flash_attn.modules: of its modules those of attention."""
