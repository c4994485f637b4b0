"""Stands in for flash_attn.ops: rotary embedding in plain torch. Its other kernels are not attention's."""
