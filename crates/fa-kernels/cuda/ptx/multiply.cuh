// Products of 32-bit numbers in 64 bits (PTX ISA, "mul"). Of 64-bit products the compiler leaves additions of
// zero halves.
#pragma once
#include "types.cuh"

namespace fa {

// The upper half of a product.
__device__ __forceinline__ u32 high_product(u32 a, u32 b) {
    u32 high;
    asm("mul.hi.u32 %0, %1, %2;" : "=r"(high) : "r"(a), "r"(b));
    return high;
}

// The address `count` times `unit` bytes after `base`.
template <class T>
__device__ __forceinline__ const T* bytes_after(const T* base, u32 count, u32 unit) {
    u64 bytes;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(bytes) : "r"(count), "r"(unit));
    return reinterpret_cast<const T*>(reinterpret_cast<const u8*>(base) + bytes);
}

}  // namespace fa
