// Bulk copies of contiguous bytes by TMA (PTX ISA, "cp.async.bulk", "cp.reduce.async.bulk"). Addresses and
// sizes are multiples of 16 bytes; one thread issues.
#pragma once
#include "ptx/address.cuh"
#include "ptx/mbarrier.cuh"
#include "types.cuh"

namespace fa {

// Loads `bytes` to shared memory and counts them on `bar` as they arrive.
__device__ __forceinline__ void bulk_load(void* dst, const void* src, u32 bytes, Mbarrier& bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            smem_address(dst)),
        "l"(src), "r"(bytes), "r"(smem_address(&bar))
        : "memory");
}

// Adds `bytes` of f32 in shared memory to global memory. Earlier writes to that shared memory need
// fence_async_shared().
__device__ __forceinline__ void bulk_add_f32(float* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst),
                 "r"(src), "r"(bytes)
                 : "memory");
}

// Stores `bytes` of shared memory to global memory. Earlier writes to that shared memory need
// fence_async_shared().
__device__ __forceinline__ void bulk_store(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src),
                 "r"(bytes)
                 : "memory");
}

// Commits the stores and adds issued since the last commit as one group.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all of this thread's groups have read their shared memory, which may then be overwritten.
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until all of this thread's groups are complete: their writes to global memory are then visible to it.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace fa
