"""Stands in for flash_attn.flash_attn_interface."""

from fa_attn import UnsupportedError

from . import *  # noqa: F403

USE_TRITON_ROCM = False


def _get_block_size_n(device, head_dim, is_dropout, is_causal):
    """The tile by which weights with dropout are laid out."""
    raise UnsupportedError("dropout: weights are never written")
