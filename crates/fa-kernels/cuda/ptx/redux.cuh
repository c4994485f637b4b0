// Reductions over the lanes of a warp, which executes them converged (PTX ISA, "redux.sync": compute
// capability 8.0 and later).
#pragma once
#include "types.cuh"

namespace fa {

// The sum of all lanes' values.
__device__ __forceinline__ int warp_sum(int value) { return __reduce_add_sync(0xffffffff, value); }

// The greatest of them.
__device__ __forceinline__ int warp_max(int value) { return __reduce_max_sync(0xffffffff, value); }

}  // namespace fa
