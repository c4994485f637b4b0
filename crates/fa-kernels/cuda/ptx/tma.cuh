// Tensor loads and stores by TMA, the tensor memory accelerator (PTX ISA, "cp.async.bulk.tensor").
#pragma once
#include "params.cuh"
#include "ptx/address.cuh"
#include "ptx/mbarrier.cuh"
#include "types.cuh"

namespace fa {

// L2 eviction policies in the encoding of createpolicy.fractional, fraction 1.
enum class L2Policy : u64 {
    EvictFirst = 0x12f0000000000000ull,
    EvictLast = 0x14f0000000000000ull,
};

// Prefetches a tensor map into the descriptor cache.
__device__ __forceinline__ void tma_prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Loads the box at coordinates (c0, c1, c2, c3), innermost first, to `dst`, and counts its bytes on `bar`.
// One thread issues.
__device__ __forceinline__ void tma_load_4d(void* dst, const TensorMap& map, Mbarrier& bar, int c0, int c1,
                                            int c2, int c3, L2Policy policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem_address(dst)),
        "l"(&map), "r"(smem_address(&bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(static_cast<u64>(policy))
        : "memory");
}

// tma_load_4d() to the same address in every CTA of the mask `ctas`, counting the bytes on the same barrier
// of each.
__device__ __forceinline__ void tma_load_4d_multicast(void* dst, const TensorMap& map, Mbarrier& bar, int c0,
                                                      int c1, int c2, int c3, L2Policy policy, u16 ctas) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::"
        "cache_hint"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %8, %7;" ::"r"(smem_address(dst)),
        "l"(&map), "r"(smem_address(&bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(static_cast<u64>(policy)),
        "h"(ctas)
        : "memory");
}

// Stores the box at coordinates (c0, c1, c2, c3) from shared memory at `src`, as far as it lies in the
// tensor, as a part of the thread's bulk group. Earlier writes to that shared memory need
// fence_async_shared().
__device__ __forceinline__ void tma_store_4d(const TensorMap& map, u32 src, int c0, int c1, int c2, int c3,
                                             L2Policy policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5}], [%1], "
        "%6;" ::"l"(&map),
        "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(static_cast<u64>(policy))
        : "memory");
}

// tma_load_4d() with a fifth, outermost coordinate.
__device__ __forceinline__ void tma_load_5d(void* dst, const TensorMap& map, Mbarrier& bar, int c0, int c1,
                                            int c2, int c3, int c4, L2Policy policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(smem_address(dst)),
        "l"(&map), "r"(smem_address(&bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4),
        "l"(static_cast<u64>(policy))
        : "memory");
}

}  // namespace fa
