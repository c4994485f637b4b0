// Twin of cuda/ptx/math.cuh: the same functions by the host's libm, subnormals flushed as the .ftz forms do.
#pragma once
#include "config.cuh"
#include "types.cuh"

namespace fa {

EMU_INLINE float float_of_bits(u32 bits) { return __builtin_bit_cast(float, bits); }
EMU_INLINE u32 bits_of_float(float x) { return __builtin_bit_cast(u32, x); }
EMU_INLINE float minus_infinity() { return -INFINITY; }
EMU_INLINE float multiply_rounded(float a, float b) { return a * b; }
EMU_INLINE float multiply_towards_zero(float a, float b) {
    const double exact = double(a) * double(b);
    const float rounded = static_cast<float>(exact);
    const bool is_exact = !(std::fabs(double(rounded)) > std::fabs(exact));
    return is_exact ? rounded : std::nextafter(rounded, 0.f);
}
EMU_INLINE float subtract_rounded(float a, float b) { return a - b; }

EMU_INLINE float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.f, x) : x; }
EMU_INLINE float exp2_approx(float x) { return flushed(exp2f(flushed(x))); }
EMU_INLINE float log2_approx(float x) { return log2f(flushed(x)); }
EMU_INLINE float reciprocal_approx(float x) { return flushed(1.f / flushed(x)); }

template <Dtype T>
EMU_INLINE u32 rounded16(float x) {
    static_assert(T == Dtype::F16 || T == Dtype::Bf16);
    if constexpr (T == Dtype::F16) {
        return __builtin_bit_cast(u16, static_cast<_Float16>(x));
    } else {
        const u32 bits = bits_of_float(x);
        return x != x ? 0x7fffu : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
}
template <Dtype T>
EMU_INLINE u32 pack(float low, float high) {
    return rounded16<T>(low) | rounded16<T>(high) << 16;
}
template <Dtype T>
EMU_INLINE float unpack_low(u32 packed) {
    static_assert(T == Dtype::F16 || T == Dtype::Bf16);
    if constexpr (T == Dtype::F16) {
        return static_cast<float>(__builtin_bit_cast(_Float16, static_cast<u16>(packed)));
    } else {
        return float_of_bits(packed << 16);
    }
}
template <Dtype T>
EMU_INLINE float unpack_high(u32 packed) {
    return unpack_low<T>(packed >> 16);
}

// The device's cubic; the exponent is added as unsigned, which may wrap.
EMU_INLINE float exp2_polynomial(float x) {
    constexpr float kRound = 12582912.f;
    x = fmaxf(x, -126.f);
    const float shifted = x + kRound;
    const float f = x - (shifted - kRound);
    float p = fmaf(f, 0.05517167f, 0.24261112f);
    p = fmaf(p, f, 0.69326099f);
    p = fmaf(p, f, 0.99992807f);
    return float_of_bits(bits_of_float(p) + (bits_of_float(shifted) << 23));
}

}  // namespace fa
