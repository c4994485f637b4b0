"""Stands in for flash_attn_3.flash_attn_interface."""

from flash_attn_interface import *  # noqa: F403
from flash_attn_interface import _flash_attn_backward as _flash_attn_backward
from flash_attn_interface import _flash_attn_forward as _flash_attn_forward
