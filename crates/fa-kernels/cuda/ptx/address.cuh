// Shared memory: the CTA's dynamic allocation, and 32-bit addresses for PTX instructions.
#pragma once
#include "types.cuh"

namespace fa {

// The CTA's dynamic shared memory as a T, aligned as T is; its size is set at launch.
template <class T>
__device__ __forceinline__ T& shared_memory() {
    extern __shared__ __align__(alignof(T)) u8 dynamic_smem[];
    return *reinterpret_cast<T*>(dynamic_smem);
}

// The address within the shared window, as PTX instructions take it.
__device__ __forceinline__ u32 smem_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// smem_address(), recomputed at each call: the address does not stay in a register across a loop.
__device__ __forceinline__ u32 smem_address_volatile(const void* pointer) {
    u32 address;
    asm volatile("mov.u32 %0, %1;" : "=r"(address) : "r"(smem_address(pointer)));
    return address;
}

}  // namespace fa
