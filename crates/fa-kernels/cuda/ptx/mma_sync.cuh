// Warp-wide matrix multiply-accumulate, m16n8k16, f32 += 16-bit x 16-bit (PTX ISA, "mma.sync").
//
// With g = l / 4 and t = l % 4, lane l holds: of the accumulator (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1); of
// A the pairs that start at (g, 2t), (g+8, 2t), (g, 2t+8), (g+8, 2t+8); of B the pairs down column g that
// start at rows 2t and 2t+8.
#pragma once
#include "config.cuh"
#include "types.cuh"

namespace fa {

template <Dtype T>
__device__ __forceinline__ void mma_m16n8k16(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
    static_assert(T == Dtype::F16 || T == Dtype::Bf16);
    if constexpr (T == Dtype::F16) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

}  // namespace fa
