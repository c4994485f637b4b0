// Single-instruction arithmetic: exponentials, reciprocals and packed conversions.
#pragma once
#include "config.cuh"
#include "types.cuh"

namespace fa {

// Bit casts between u32 and f32.
__device__ __forceinline__ float float_of_bits(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 bits_of_float(float x) { return __float_as_uint(x); }

__device__ __forceinline__ float minus_infinity() { return float_of_bits(0xff800000); }

// a * b and a - b, each rounded: never contracted into an FMA.
__device__ __forceinline__ float multiply_rounded(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float subtract_rounded(float a, float b) { return __fsub_rn(a, b); }

// a * b rounded towards zero: of finite factors it is finite, at most the largest f32 in magnitude.
__device__ __forceinline__ float multiply_towards_zero(float a, float b) { return __fmul_rz(a, b); }

// 2^x by the special-function unit, subnormals flushed; -inf gives 0 (PTX ISA, "ex2.approx.ftz").
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Rounds two f32 to 16 bits (nearest even) and packs them in one register, `low` in the low half.
template <Dtype T>
__device__ __forceinline__ u32 pack(float low, float high) {
    static_assert(T == Dtype::F16 || T == Dtype::Bf16);
    u32 packed;
    if constexpr (T == Dtype::F16) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
}

// The low, and the high, element of a packed register as f32.
template <Dtype T>
__device__ __forceinline__ float unpack_low(u32 packed) {
    static_assert(T == Dtype::F16 || T == Dtype::Bf16);
    float value;
    if constexpr (T == Dtype::F16) {
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}"
            : "=f"(value)
            : "r"(packed));
    } else {
        value = __int_as_float(packed << 16);
    }
    return value;
}

template <Dtype T>
__device__ __forceinline__ float unpack_high(u32 packed) {
    return T == Dtype::F16 ? unpack_low<T>(packed >> 16) : __int_as_float(packed & 0xffff0000);
}

// 2^x for x <= 0 on the FMA units alone: x = n + f with f in [-1/2, 1/2], a cubic for 2^f, n added to the
// exponent. The cubic is the minimax fit of 2^f in relative error (Remez): 7.5e-5, where half a bf16 step is
// 2e-3 and half an f16 step is 2.4e-4. Below -126 the result is 2^-126: negligible where the largest is 1.
__device__ __forceinline__ float exp2_polynomial(float x) {
    constexpr float kRound =
        12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
    x = fmaxf(x, -126.f);
    const float shifted = x + kRound;
    const float f = x - (shifted - kRound);
    float p = fmaf(f, 0.05517167f, 0.24261112f);
    p = fmaf(p, f, 0.69326099f);
    p = fmaf(p, f, 0.99992807f);
    return __int_as_float(__float_as_int(p) + (__float_as_int(shifted) << 23));
}

}  // namespace fa
