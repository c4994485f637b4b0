// CTA and cluster barriers, and fences (PTX ISA, "barrier", "barrier.cluster", "fence.proxy").
#pragma once
#include "types.cuh"

namespace fa {

// Waits for all threads of the CTA: barrier 0.
__device__ __forceinline__ void cta_sync() { __syncthreads(); }

// Waits until `threads` threads have arrived at barrier `id`, 1 to 15. Warps execute it converged.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// named_barrier_sync() for threads that reach the barrier from different instructions of the program.
__device__ __forceinline__ void named_barrier_sync_unaligned(int id, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at barrier `id` without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Waits for all threads of the cluster; shared-memory writes before it are visible to all after it.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

// Orders this thread's memory accesses before the fence ahead of those after it, as seen by every thread of
// the GPU.
__device__ __forceinline__ void fence_gpu() { __threadfence(); }

// Orders this thread's generic-proxy accesses to shared memory before later async-proxy accesses (wgmma,
// TMA).
__device__ __forceinline__ void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Suspends the thread for about a nanosecond.
__device__ __forceinline__ void pause() { asm volatile("nanosleep.u32 1;" ::: "memory"); }

}  // namespace fa
