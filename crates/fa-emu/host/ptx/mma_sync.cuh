// Twin of cuda/ptx/mma_sync.cuh.
#pragma once
#include "config.cuh"
#include "types.cuh"

namespace fa {

template <Dtype T>
EMU_INLINE void mma_m16n8k16(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
    static_assert(T == Dtype::F16 || T == Dtype::Bf16);
    emu::mma_m16n8k16(T == Dtype::Bf16, d, a, b0, b1);
}

}  // namespace fa
