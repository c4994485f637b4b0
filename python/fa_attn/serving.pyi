from typing import Any, Dict, Iterable, Optional, Tuple, Union

from .interface import Array, Window

class SchedulerMetadata:
    batch_size: int
    max_seqlen_q: int
    num_heads_q: int
    num_heads_kv: int
    headdim: int
    headdim_v: int
    qkv_dtype: Any
    page_size: Optional[int]
    causal: bool
    window_size: Window
    has_softcap: bool
    plans: Dict[Tuple[int, int], Any]

def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: Optional[Array] = None,
    v: Optional[Array] = None,
    rotary_cos: Optional[Array] = None,
    rotary_sin: Optional[Array] = None,
    cache_seqlens: Union[int, Array, None] = None,
    cache_batch_idx: Optional[Array] = None,
    cache_leftpad: Optional[Array] = None,
    block_table: Optional[Array] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Optional[Array] = None,
    num_splits: Optional[int] = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Optional[Array] = None,
    cu_seqlens_q: Optional[Array] = None,
    cu_seqlens_k_new: Optional[Array] = None,
    max_seqlen_q: Optional[int] = None,
    rotary_seqlens: Optional[Array] = None,
    out: Optional[Array] = None,
    scheduler_metadata: Optional[SchedulerMetadata] = None,
    **others: Any,
) -> Any: ...
def merge(
    outs: Iterable[Array],
    lses: Iterable[Array],
    sinks: Optional[Array] = None,
    dtype: Any = None,
) -> Tuple[Array, Array]: ...
def flash_attn_combine(
    out_partial: Array,
    lse_partial: Array,
    out: Optional[Array] = None,
    out_dtype: Any = None,
    cu_seqlens: Optional[Array] = None,
    seqused: Optional[Array] = None,
    virtual_batch_idx: Optional[Array] = None,
    return_lse: bool = True,
) -> Tuple[Array, Optional[Array]]: ...
def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Array,
    qkv_dtype: Any = None,
    headdim_v: Optional[int] = None,
    cu_seqlens_q: Optional[Array] = None,
    cu_seqlens_k_new: Optional[Array] = None,
    cache_leftpad: Optional[Array] = None,
    page_size: Optional[int] = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: Optional[int] = 0,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
) -> SchedulerMetadata: ...
