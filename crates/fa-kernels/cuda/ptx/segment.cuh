// Shuffles within segments of a warp (PTX ISA, "shfl.sync", segments).
#pragma once
#include "types.cuh"

namespace fa {

// The value of lane `lane` of each lane's own segment of `Width` lanes, a power of two.
template <int Width, typename T>
__device__ __forceinline__ T shuffle_within(T value, int lane) {
    return __shfl_sync(0xffffffff, value, lane, Width);
}

}  // namespace fa
