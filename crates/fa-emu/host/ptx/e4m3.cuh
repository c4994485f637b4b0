// Twin of cuda/ptx/e4m3.cuh.
#pragma once
#include "config.cuh"
#include "ptx/math.cuh"
#include "ptx/wgmma.cuh"
#include "types.cuh"

namespace fa {

EMU_INLINE u32 e4m3_code(float x) {
    const u32 sign = bits_of_float(x) >> 24 & 0x80;
    const float size = fabsf(x);
    if (x != x) return 0x7f;
    if (size >= 448.f) return sign | 0x7e;
    // Subnormals count steps of 2^-9; of others the exponent is rebased from 127 to 7.
    if (size < 0x1p-6f) return sign | u32(nearbyintf(size * 0x1p9f));
    const u32 bits = bits_of_float(size);
    return sign | ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
}
EMU_INLINE u32 pack_e4m3(float a, float b, float c, float d) {
    return e4m3_code(a) | e4m3_code(b) << 8 | e4m3_code(c) << 16 | e4m3_code(d) << 24;
}

namespace wgmma {

template <int N>
struct MmaE4m3 {
    EMU_INLINE static void ss(float (&d)[N / 2], u64 a, u64 b, int accumulate) {
        emu::wgmma({emu::Element::E4m3, N, false, false, d, nullptr, a, b, accumulate != 0});
    }
    EMU_INLINE static void rs(float (&d)[N / 2], const u32* a, u64 b, int accumulate) {
        emu::wgmma({emu::Element::E4m3, N, false, false, d, a, 0, b, accumulate != 0});
    }
};

}  // namespace wgmma
}  // namespace fa
