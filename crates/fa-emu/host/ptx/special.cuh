// Twin of cuda/ptx/special.cuh: the same functions by the host's libm.
#pragma once
#include "ptx/math.cuh"
#include "types.cuh"

namespace fa {

EMU_INLINE float divide(float a, float b) { return flushed(flushed(a) / flushed(b)); }
EMU_INLINE float sqrt_approx(float x) { return sqrtf(flushed(x)); }
EMU_INLINE float rsqrt_approx(float x) { return 1.f / sqrtf(flushed(x)); }
EMU_INLINE float sin_approx(float x) { return sinf(x); }
EMU_INLINE float cos_approx(float x) { return cosf(x); }
EMU_INLINE float min_or_nan(float a, float b) { return a != a || a <= b ? a : b; }
EMU_INLINE float max_or_nan(float a, float b) { return a != a || a >= b ? a : b; }
EMU_INLINE float abs_of(float x) { return fabsf(x); }
EMU_INLINE float floor_of(float x) { return floorf(x); }
EMU_INLINE float nearest_integer(float x) { return rintf(x); }
EMU_INLINE int int_of_float(float x) {
    if (x != x) return 0;
    if (x >= 2147483648.f) return 2147483647;
    return x < -2147483648.f ? -2147483647 - 1 : static_cast<int>(x);
}

template <int Offset>
EMU_INLINE u32 load_u16_here(const u8* from) {
    return *reinterpret_cast<const u16*>(from + Offset);
}
template <int Offset>
EMU_INLINE u32 load_u32_here(const u8* from) {
    return *reinterpret_cast<const u32*>(from + Offset);
}
template <int Offset>
EMU_INLINE void load_u32x2_here(const u8* from, u32& x, u32& y) {
    x = load_u32_here<Offset>(from);
    y = load_u32_here<Offset + 4>(from);
}

}  // namespace fa
