// Indices of a thread within its warp, its CTA and the grid, all one-dimensional.
#pragma once
#include "types.cuh"

namespace fa {

// The thread within its CTA.
__device__ __forceinline__ u32 thread_index() { return threadIdx.x; }

// Threads of a CTA.
__device__ __forceinline__ u32 cta_threads() { return blockDim.x; }

// The CTA within the grid.
__device__ __forceinline__ u32 cta_index() { return blockIdx.x; }

// CTAs of the grid.
__device__ __forceinline__ u32 cta_count() { return gridDim.x; }

// The thread within its warp.
__device__ __forceinline__ int lane_index() { return threadIdx.x % 32; }

// The warp within its CTA, in a form that the compiler knows to be equal in all lanes: a shuffle, which the
// whole warp executes together.
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

// The CTA within its cluster.
__device__ __forceinline__ u32 cluster_cta_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

}  // namespace fa
