// Shared memory: the CTA's allocation, and addresses as instructions take them.
#pragma once
#include "types.cuh"

namespace fa {

// The CTA's dynamic shared memory, as large as the launch asks for and aligned as T is.
template <class T>
__device__ __forceinline__ T& shared_memory() {
    extern __shared__ __align__(alignof(T)) u8 dynamic_smem[];
    return *reinterpret_cast<T*>(dynamic_smem);
}

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
