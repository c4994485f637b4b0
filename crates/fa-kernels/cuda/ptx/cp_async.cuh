// Asynchronous copies from global to shared memory (PTX ISA, "cp.async"), committed and awaited in groups. A
// thread waits for its own copies only; a barrier makes them visible to other threads.
#pragma once
#include "types.cuh"

namespace fa {

// Copies 16 bytes, bypassing L1; both addresses are 16-byte aligned. With fewer `bytes` it reads these and
// writes zeros behind them.
__device__ __forceinline__ void cp_async_16(u32 dst, const void* src, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)
                 : "memory");
}

// Copies 4 bytes; with `bytes` 0 it writes zero instead.
__device__ __forceinline__ void cp_async_4(u32 dst, const void* src, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}

// Commits the copies issued since the last commit as one group, which may be empty.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the newest `Pending` groups are still in flight.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace fa
