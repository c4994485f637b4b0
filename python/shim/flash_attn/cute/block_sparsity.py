"""Stands in for flash_attn.cute.block_sparsity: the lists of blocks that `block_sparse_tensors` takes."""

from typing import NamedTuple, Optional, Tuple

import torch


class BlockSparseTensorsTorch(NamedTuple):
    """Of each block of queries the blocks of keys that are seen in part (in whole without a mask) and in whole:
    their numbers (batch, heads, blocks) and their indices (batch, heads, blocks, most)."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: Optional[torch.Tensor] = None
    full_block_idx: Optional[torch.Tensor] = None
    cu_total_m_blocks: Optional[torch.Tensor] = None
    cu_block_idx_offsets: Optional[torch.Tensor] = None
    block_size: Optional[Tuple[int, int]] = None
    dq_write_order: Optional[torch.Tensor] = None
    dq_write_order_full: Optional[torch.Tensor] = None
    is_valid_total: Optional[torch.Tensor] = None
    spt: Optional[bool] = None
