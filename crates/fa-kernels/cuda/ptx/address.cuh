// Shared-memory addresses as the instructions take them.
#pragma once
#include "types.cuh"

namespace fa {

__device__ __forceinline__ u32 smem_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

}  // namespace fa
