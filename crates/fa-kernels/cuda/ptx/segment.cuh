// Shuffles within segments of a warp (PTX ISA, "shfl.sync", segments).
#pragma once
#include "types.cuh"

namespace fa {

// Broadcasts the value of lane `lane` within each segment of `Width` lanes, a power of two.
template <int Width, typename T>
__device__ __forceinline__ T shuffle_within(T value, int lane) {
    return __shfl_sync(0xffffffff, value, lane, Width);
}

}  // namespace fa
