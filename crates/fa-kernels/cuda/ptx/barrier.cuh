// Barriers that warps reach from different instructions (PTX ISA, "barrier").
#pragma once
#include "types.cuh"

namespace fa {

// Waits until `threads` threads have arrived at barrier `id`, wherever in the program they are: bar.sync, of ptx/sync.cuh, promises that
// all that wait at a time do so by one instruction.
__device__ __forceinline__ void named_barrier_sync_apart(int id, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace fa
