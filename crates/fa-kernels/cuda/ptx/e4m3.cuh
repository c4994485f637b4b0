// e4m3 numbers: packing (PTX ISA, "cvt") and products m64 nN k32, f32 += e4m3 x e4m3 (PTX ISA,
// "wgmma.mma_async"). Both operands are K-major: there are no transposed ones in 8 bits.
#pragma once
#include "config.cuh"
#include "ptx/wgmma.cuh"
#include "types.cuh"

namespace fa {

// Rounds four f32 to e4m3 (nearest even, saturating; NaN stays NaN) and packs them, the first in the low
// byte.
__device__ __forceinline__ u32 pack_e4m3(float a, float b, float c, float d) {
    u32 packed;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}\n"
        : "=r"(packed)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return packed;
}

namespace wgmma {

template <int N>
struct MmaE4m3;

#define FA_WGMMA_E4M3(N, R, O0, O1, O2, O3, O4, O5)                                                     \
    template <>                                                                                         \
    struct MmaE4m3<N> {                                                                                 \
        /* A and B by shared-memory descriptors; d = a b + (accumulate ? d : 0). */                     \
        __device__ __forceinline__ static void ss(float (&d)[R], u64 a, u64 b, int accumulate) {        \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O2                                       \
                         ", 0;\n"                                                                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" FA_R##R           \
                         "}, %" #O0 ", %" #O1 ", p, 1, 1;\n}\n"                                         \
                         : FA_D##R                                                                      \
                         : "l"(a), "l"(b), "r"(accumulate)                                              \
                         : "memory");                                                                   \
        }                                                                                               \
        /* A as four registers of four numbers. */                                                      \
        __device__ __forceinline__ static void rs(float (&d)[R], const u32* a, u64 b, int accumulate) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O5                                       \
                         ", 0;\n"                                                                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" FA_R##R           \
                         "}, {%" #O0 ", %" #O1 ", %" #O2 ", %" #O3 "}, %" #O4 ", p, 1, 1;\n}\n"         \
                         : FA_D##R                                                                      \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)          \
                         : "memory");                                                                   \
        }                                                                                               \
    };

FA_WGMMA_E4M3(32, 16, 16, 17, 18, 19, 20, 21)
FA_WGMMA_E4M3(64, 32, 32, 33, 34, 35, 36, 37)
FA_WGMMA_E4M3(96, 48, 48, 49, 50, 51, 52, 53)
FA_WGMMA_E4M3(128, 64, 64, 65, 66, 67, 68, 69)
FA_WGMMA_E4M3(160, 80, 80, 81, 82, 83, 84, 85)
FA_WGMMA_E4M3(192, 96, 96, 97, 98, 99, 100, 101)
FA_WGMMA_E4M3(224, 112, 112, 113, 114, 115, 116, 117)
FA_WGMMA_E4M3(256, 128, 128, 129, 130, 131, 132, 133)

}  // namespace wgmma
}  // namespace fa
