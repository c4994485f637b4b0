// Asynchronous copies from global to shared memory (PTX ISA, "cp.async"): issued, committed in groups, waited
// for by group. A thread waits for its own copies only; a barrier makes them visible to the others.
#pragma once
#include "types.cuh"

namespace fa {

// 16 bytes, both addresses aligned to 16, past the L1 cache. With `bytes` 0 it writes zeros.
__device__ __forceinline__ void cp_async_16(u32 dst, const void* src, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)
                 : "memory");
}

// Closes the group of the copies issued since the last commit; it may be empty.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the `Pending` newest groups are unfinished.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace fa
