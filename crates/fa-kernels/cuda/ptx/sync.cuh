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

__device__ __forceinline__ int lane_index() { return threadIdx.x % 32; }

}  // namespace fa
