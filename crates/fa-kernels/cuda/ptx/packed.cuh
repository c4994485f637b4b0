// Arithmetic on two 16-bit numbers in a register, and the bytes of registers (PTX ISA, "fma", "prmt", "cvt").
#pragma once
#include "config.cuh"
#include "types.cuh"

namespace fa {

// a * b + c in each half, rounded once; subnormals are kept.
template <Dtype T>
__device__ __forceinline__ u32 fma_packed(u32 a, u32 b, u32 c) {
    static_assert(T == Dtype::F16 || T == Dtype::Bf16);
    u32 d;
    if constexpr (T == Dtype::F16) {
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    } else {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    }
    return d;
}

// Four of the eight bytes of `low` (0 to 3) and `high` (4 to 7): byte i by the i-th hex digit of `Selector`,
// counted from the right.
template <u32 Selector>
__device__ __forceinline__ u32 bytes_of(u32 low, u32 high) {
    return __byte_perm(low, high, Selector);
}

// Four bytes of `word`, byte i by the i-th hex digit of `Selector` counted from the right: 0 to 3 for the
// byte itself, 8 to 11 for eight copies of the sign of byte 0 to 3.
template <u32 Selector>
__device__ __forceinline__ u32 signed_bytes_of(u32 word) {
    u32 bytes;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(bytes) : "r"(word), "n"(Selector));
    return bytes;
}

// Whether there is an instruction that converts e4m3.
#if __CUDA_ARCH__ >= 890
constexpr bool kConvertsE4m3 = true;

// Two e4m3 codes, the first in the low byte, as f16; NaN stays NaN.
__device__ __forceinline__ u32 f16_of_e4m3(u16 codes) {
    u32 values;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(values) : "h"(codes));
    return values;
}
#else
constexpr bool kConvertsE4m3 = false;

__device__ __forceinline__ u32 f16_of_e4m3(u16) { return 0; }
#endif

}  // namespace fa
