// Products of 32-bit numbers in 64 bits (PTX ISA, "mul.wide").
#pragma once
#include "types.cuh"

namespace fa {

// The address `count` times `unit` bytes after `base`: one instruction, whereas of a 64-bit product the
// compiler leaves additions of zero halves.
template <class T>
__device__ __forceinline__ const T* bytes_after(const T* base, u32 count, u32 unit) {
    u64 bytes;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(bytes) : "r"(count), "r"(unit));
    return reinterpret_cast<const T*>(reinterpret_cast<const u8*>(base) + bytes);
}

}  // namespace fa
