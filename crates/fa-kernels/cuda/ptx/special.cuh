// Single-instruction functions that programs of the user's own may call, beyond those of math.cuh.
#pragma once
#include "types.cuh"

namespace fa {

// Division over the whole range of f32, within 2 ulp; subnormals flushed.
__device__ __forceinline__ float divide(float a, float b) {
    float y;
    asm("div.full.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

__device__ __forceinline__ float sqrt_approx(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float rsqrt_approx(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Accurate within [-pi, pi].
__device__ __forceinline__ float sin_approx(float x) {
    float y;
    asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float cos_approx(float x) {
    float y;
    asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The smaller and the larger; NaN if either is.
__device__ __forceinline__ float min_or_nan(float a, float b) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

__device__ __forceinline__ float max_or_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

__device__ __forceinline__ float abs_of(float x) { return fabsf(x); }

__device__ __forceinline__ float floor_of(float x) {
    float y;
    asm("cvt.rmi.f32.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float nearest_integer(float x) {
    float y;
    asm("cvt.rni.f32.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Rounded towards 0, saturating; NaN is 0.
__device__ __forceinline__ int int_of_float(float x) {
    int y;
    asm("cvt.rzi.s32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

// Loads from global memory, `Offset` bytes after `from`, that the compiler neither moves nor joins with
// others.
template <int Offset>
__device__ __forceinline__ u32 load_u16_here(const u8* from) {
    u16 x;
    asm volatile("ld.global.u16 %0, [%1 + %2];" : "=h"(x) : "l"(from), "n"(Offset));
    return x;
}
template <int Offset>
__device__ __forceinline__ u32 load_u32_here(const u8* from) {
    u32 x;
    asm volatile("ld.global.u32 %0, [%1 + %2];" : "=r"(x) : "l"(from), "n"(Offset));
    return x;
}
template <int Offset>
__device__ __forceinline__ void load_u32x2_here(const u8* from, u32& x, u32& y) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2 + %3];" : "=r"(x), "=r"(y) : "l"(from), "n"(Offset));
}

}  // namespace fa
