// Atomics on global memory, and acquire/release accesses for semaphores (PTX ISA, "atom", "red",
// "ld.acquire").
#pragma once
#include "types.cuh"

namespace fa {

// Whether the target has red.global.add.v4.f32: compute capability 9.0 and later.
constexpr bool kVectorRed = __CUDA_ARCH__ >= 900;

// Adds `value` to `*counter`; returns the old value.
__device__ __forceinline__ u32 atomic_add(u32* counter, u32 value) { return atomicAdd(counter, value); }

// Adds `value` to `*dst`.
__device__ __forceinline__ void red_add_f32(float* dst, float value) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(dst), "f"(value) : "memory");
}

// Adds to four consecutive values at once; `dst` is 16-byte aligned. Requires kVectorRed.
__device__ __forceinline__ void red_add_f32x4(float* dst, float a, float b, float c, float d) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(dst), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}

// Reads `*semaphore`; writes released by the increments that it observes are visible afterwards.
__device__ __forceinline__ u32 load_acquire(const u32* semaphore) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(semaphore) : "memory");
    return value;
}

// Adds 1 to `*semaphore` after this thread's earlier writes and additions, and those of threads that it has
// met at a barrier since: a release is cumulative (PTX ISA, "causality order"). A further fence would cost a
// tenth of a deterministic launch (NB-127).
__device__ __forceinline__ void red_release_increment(u32* semaphore) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(semaphore) : "memory");
}

}  // namespace fa
