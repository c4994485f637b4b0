// Warp-wide instructions, executed converged (PTX ISA, "shfl.sync", "vote.sync", "elect.sync").
#pragma once
#include "types.cuh"

namespace fa {

// The value of lane (own index ^ `mask`).
template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
    return __shfl_xor_sync(0xffffffff, value, mask);
}

// The value of lane `lane`.
template <typename T>
__device__ __forceinline__ T shuffle_from(T value, int lane) {
    return __shfl_sync(0xffffffff, value, lane);
}

// True in all lanes if `predicate` is true in any.
__device__ __forceinline__ bool warp_any(bool predicate) { return __any_sync(0xffffffff, predicate); }

// Waits for all lanes; memory accesses before it are visible to all of them after it.
__device__ __forceinline__ void warp_sync() { __syncwarp(); }

// True in exactly one lane.
__device__ __forceinline__ bool elect_one() {
    u32 elected;
    asm volatile(
        "{\n.reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(elected));
    return elected != 0;
}

}  // namespace fa
