// Thread, warp and CTA indices. Blocks, grids and clusters are one-dimensional.
#pragma once
#include "types.cuh"

namespace fa {

// The thread's index within its CTA.
__device__ __forceinline__ u32 thread_index() { return threadIdx.x; }

// Threads per CTA.
__device__ __forceinline__ u32 cta_threads() { return blockDim.x; }

// The CTA's index within the grid.
__device__ __forceinline__ u32 cta_index() { return blockIdx.x; }

// CTAs in the grid.
__device__ __forceinline__ u32 cta_count() { return gridDim.x; }

// The thread's index within its warp.
__device__ __forceinline__ int lane_index() { return threadIdx.x % 32; }

// The warp's index within its CTA, by a shuffle, so that the compiler knows it to be uniform. The whole warp
// executes it, converged.
__device__ __forceinline__ int warp_index() { return __shfl_sync(0xffffffff, threadIdx.x / 32, 0); }

// thread_index(), reread at each call: neither it nor anything derived from it stays in a register across a
// loop.
__device__ __forceinline__ int thread_index_volatile() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// cta_index(), reread at each call.
__device__ __forceinline__ int cta_index_volatile() {
    int cta;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(cta));
    return cta;
}

// The CTA's rank within its cluster.
__device__ __forceinline__ u32 cluster_cta_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

}  // namespace fa
