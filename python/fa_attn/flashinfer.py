"""FlashInfer's attention: its functions and wrappers for single requests, packed and paged batches, decoding,
latents (MLA), listed blocks, cascades and merges, by its names, arguments, layouts and results; by the names
of TensorRT-LLM's, XQA's and cuDNN's kernels too, whichever kernel of fa computes them.

>>> import fa_attn.flashinfer as flashinfer
>>> wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
>>> wrapper.plan(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, 32, 8, 128, 16, causal=True)
>>> out, lse = wrapper.run(q, paged_kv_cache, return_lse=True)

`stand_in()` enters them as `flashinfer` and its modules, for programs that import those.

LSE is (rows, heads) in base 2, as there. Masks and windows are aligned to the bottom right. Torch's tensors,
on GPUs and on the CPU. A plan makes the page table and its lengths once, and copies starts to the host, as
FlashInfer's does; a run launches. With `use_cuda_graph` tables have a fixed place and later plans are seen by
captured calls; a sequence has then at most the pages of the table, all of the buffer's where batch times
buffer is up to 4 Mi, and else at least the buffer's even share. What lies in buffers counts when plan() is
called, not later.

`pos_encoding_mode`: 'ALIBI' is a score function; 'ROPE_LLAMA' turns q and a packed copy of the keys by
torch's operations in each call. Caches are of q's type, float8_e4m3fn or float8_e5m2; factors (`k_scale`,
`v_scale`, ..) are numbers or tensors of one element.

Functions on page tables (`trtllm_..`, `xqa`, ..) read nothing on the host and can be captured, but for
cuDNN's offsets of results and values beside those of queries and keys, which are compared there. Their lse
are in base 2, cuDNN's natural, and include sinks. Tables of K and V apart copy the pages that they name.

`jit_args` is a program of fa (its text or a `Program`) in place of CUDA's text: scores and masks of a
wrapper's own. A wrapper for a prefill beside decoding launches one kernel after the other.

Accepted and not needed: workspaces, `backend`, `use_tensor_cores`, `use_fp16_qk_reduction`, `enable_pdl`,
`non_blocking`, `use_profiler`, `o_scale`, counters, and lengths and tables that repeat the starts
(`seq_lens`, `block_tables` of plans, `max_token_per_sequence`, `max_item_len_ptr`, ..). `disable_split_kv`
and `fixed_split_size` leave keys undivided: a row's bits do not depend on its batch. Refused by name: NVFP4
caches and results (`kv_cache_sf`, `o_sf_scale`), skipped softmax, SageAttention's factors. There are no
gradients.
"""

from __future__ import annotations

import importlib.util
import sys
import types

from ._flashinfer_calls import (
    cudnn_batch_decode_with_kv_cache,
    cudnn_batch_prefill_with_kv_cache,
    trtllm_batch_context_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
    trtllm_fmha_v2_prefill,
    trtllm_ragged_attention_deepseek,
    xqa,
    xqa_batch_decode_with_kv_cache,
)
from ._flashinfer_cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
)
from ._flashinfer_decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from ._flashinfer_mla import (
    BatchMLAPagedAttentionWrapper,
    trtllm_batch_decode_sparse_mla_dsv4,
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
    xqa_mla,
)
from ._flashinfer_pages import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    merge_state,
    merge_state_in_place,
    merge_states,
    packbits,
    segment_packbits,
)
from ._flashinfer_pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
from ._flashinfer_prefill import (
    BatchAttention,
    BatchAttentionWithAttentionSinkWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)
from ._flashinfer_single import (
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from ._flashinfer_sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPODWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "PODWithPagedKVCacheWrapper",
    "VariableBlockSparseAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "cudnn_batch_decode_with_kv_cache",
    "cudnn_batch_prefill_with_kv_cache",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "packbits",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "stand_in",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_sparse_mla_dsv4",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek",
    "xqa",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
    "xqa_mla",
]


_MODULES = {
    "prefill": (
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "single_prefill_with_kv_cache",
        "single_prefill_with_kv_cache_return_lse",
        "cudnn_batch_prefill_with_kv_cache",
        "trtllm_batch_context_with_kv_cache",
        "trtllm_fmha_v2_prefill",
        "trtllm_ragged_attention_deepseek",
    ),
    "decode": (
        "BatchDecodeWithPagedKVCacheWrapper",
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
        "fast_decode_plan",
        "single_decode_with_kv_cache",
        "cudnn_batch_decode_with_kv_cache",
        "trtllm_batch_decode_sparse_mla_dsv4",
        "trtllm_batch_decode_with_kv_cache",
        "trtllm_batch_decode_with_kv_cache_mla",
        "xqa_batch_decode_with_kv_cache",
        "xqa_batch_decode_with_kv_cache_mla",
    ),
    "cascade": (
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
        "MultiLevelCascadeAttentionWrapper",
        "merge_state",
        "merge_state_in_place",
        "merge_states",
    ),
    "cudnn": ("cudnn_batch_decode_with_kv_cache", "cudnn_batch_prefill_with_kv_cache"),
    "pod": ("BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"),
    "sparse": ("BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"),
    "page": (
        "append_paged_kv_cache",
        "append_paged_mla_kv_cache",
        "get_batch_indices_positions",
        "get_seq_lens",
    ),
    "mla": (
        "BatchMLAPagedAttentionWrapper",
        "trtllm_batch_decode_sparse_mla_dsv4",
        "trtllm_batch_decode_with_kv_cache_mla",
        "xqa_batch_decode_with_kv_cache_mla",
    ),
    "xqa": ("xqa", "xqa_mla"),
    "attention": ("BatchAttention", "BatchAttentionWithAttentionSinkWrapper"),
    "quantization": ("packbits", "segment_packbits"),
}


def stand_in() -> None:
    """Enters these as `flashinfer` and its modules (`flashinfer.prefill`, ..). Where FlashInfer is installed
    its other functions stay, such as those that sample, and these take the place of its own; programs that
    have imported its names before keep them."""
    is_there = "flashinfer" in sys.modules or importlib.util.find_spec("flashinfer") is not None
    whole = importlib.import_module("flashinfer") if is_there else _module("flashinfer")
    whole.__dict__.setdefault("__path__", [])
    for place, names in _MODULES.items():
        name = f"flashinfer.{place}"
        part = importlib.import_module(name) if is_there else _module(name)
        setattr(whole, place, part)
        for function in names:
            setattr(part, function, globals()[function])
            setattr(whole, function, globals()[function])


def _module(name):
    made = sys.modules[name] = types.ModuleType(name, f"Attention of {name}, by fa_attn.flashinfer.")
    made.__getattr__ = _missing  # type: ignore[method-assign]
    return made


def _missing(name):
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(f"fa_attn.flashinfer has no {name}: it has FlashInfer's attention, pages and merges")
