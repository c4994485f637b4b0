// Named barriers, proxy fences and lane election (PTX ISA, "barrier", "fence.proxy", "elect.sync").
#pragma once
#include "types.cuh"

namespace fa {

// Waits until `threads` threads have arrived at barrier `id` (1 to 15; 0 is __syncthreads).
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at barrier `id` without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Orders this thread's ordinary shared-memory accesses before accesses of the tensor cores and the copy engine.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Waits for all threads of the cluster; shared-memory accesses before it are visible to all after it.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 cluster_block_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Lets other warps run for about a nanosecond.
__device__ __forceinline__ void pause() { asm volatile("nanosleep.u32 1;" ::: "memory"); }

// True in one lane of the (converged) warp.
__device__ __forceinline__ bool elect_one() {
    u32 elected;
    asm volatile(
        "{\n.reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(elected));
    return elected != 0;
}

// Number of this thread's warp within the block, known to the compiler to be the same in all lanes.
__device__ __forceinline__ int warp_index() { return __shfl_sync(0xffffffff, threadIdx.x / 32, 0); }

// threadIdx.x, read where it is asked for: what follows from it is not kept in registers across a loop.
__device__ __forceinline__ int thread_index_reread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// Likewise blockIdx.x.
__device__ __forceinline__ int block_index_reread() {
    int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return block;
}

__device__ __forceinline__ int lane_index() { return threadIdx.x % 32; }

}  // namespace fa
