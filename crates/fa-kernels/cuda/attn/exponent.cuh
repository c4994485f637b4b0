// Exponents of 2 of sinks and LSE, which may be as large as f32 holds while their exponents may not.
#pragma once
#include "ptx/math.cuh"
#include "types.cuh"

namespace fa {

// `x`, at most the largest f32 in magnitude. NaN stays.
__device__ __forceinline__ float finite(float x) {
    return x > kLargest ? kLargest : x < -kLargest ? -kLargest : x;
}

// A sink's exponent: at most the largest f32, as the difference of two infinities is NaN. A sink too low to
// have an exponent counts as -inf, which adds nothing to a sum.
__device__ __forceinline__ float sink_exponent(float sink) {
    const float exponent = sink * kLog2e;
    return exponent > kLargest ? kLargest : exponent;
}

// The LSE (natural) of a row whose `sum`, relative to 2^max, includes its sink. Relative to a sink that no
// exponent exceeds, it is that sink to the last bit, however large.
__device__ __forceinline__ float lse_with_sink(float sink, float max, float sum) {
    const float above = sink_exponent(sink) - max;
    return above >= 0.f ? sink + (log2f(sum) - above) * kLn2 : (max + log2f(sum)) * kLn2;
}

// The exponent that the backward subtracts from those of a row with this LSE: finite, and, where f32 no
// longer tells probabilities apart, above every exponent of the row, so that no probability overflows.
__device__ __forceinline__ float lse_exponent(float lse) {
    constexpr float kLarge = 16777216.f, kAbove = 1.f / 2097152.f;  // 2^24, 2^-21
    const float exponent = finite(lse * kLog2e), size = fabsf(exponent);
    return size < kLarge ? exponent : finite(fmaf(size, kAbove, exponent));
}

}  // namespace fa
