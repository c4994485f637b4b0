// Shared-memory addresses as the instructions take them.
#pragma once
#include "types.cuh"

namespace fa {

__device__ __forceinline__ u32 smem_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// The same, worked out where it is asked for: it is not kept in a register across a loop.
__device__ __forceinline__ u32 smem_address_reread(const void* pointer) {
    u32 address;
    asm volatile("mov.u32 %0, %1;" : "=r"(address) : "r"(smem_address(pointer)));
    return address;
}

}  // namespace fa
