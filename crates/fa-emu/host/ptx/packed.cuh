// Twin of cuda/ptx/packed.cuh.
#pragma once
#include "config.cuh"
#include "ptx/math.cuh"
#include "types.cuh"

namespace fa {

// By f32, in which the products and sums of converted codes are exact.
template <Dtype T>
EMU_INLINE u32 fma_packed(u32 a, u32 b, u32 c) {
    const float low = fmaf(unpack_low<T>(a), unpack_low<T>(b), unpack_low<T>(c));
    return pack<T>(low, fmaf(unpack_high<T>(a), unpack_high<T>(b), unpack_high<T>(c)));
}

template <u32 Selector>
EMU_INLINE u32 bytes_of(u32 low, u32 high) {
    const u64 both = u64(high) << 32 | low;
    u32 bytes = 0;
    for (int i = 0; i < 4; ++i) bytes |= u32(both >> 8 * (Selector >> 4 * i & 7) & 0xff) << 8 * i;
    return bytes;
}

template <u32 Selector>
EMU_INLINE u32 signed_bytes_of(u32 word) {
    u32 bytes = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 digit = Selector >> 4 * i & 15, byte = word >> 8 * (digit & 3) & 0xff;
        bytes |= (digit & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
    }
    return bytes;
}

constexpr bool kConvertsE4m3 = __CUDA_ARCH__ >= 890;

EMU_INLINE u32 f16_of_e4m3(u16 codes) {
    auto value = [](u32 code) {
        const int exponent = int(code >> 3 & 15), mantissa = int(code & 7);
        const float size =
            exponent == 0 ? ldexpf(float(mantissa), -9) : ldexpf(float(8 + mantissa), exponent - 10);
        const float own = (code & 0x7f) == 0x7f ? NAN : size;
        return code & 0x80 ? -own : own;
    };
    return pack<Dtype::F16>(value(codes & 0xff), value(codes >> 8));
}

}  // namespace fa
