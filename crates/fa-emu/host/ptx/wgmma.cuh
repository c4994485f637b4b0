// Twin of cuda/ptx/wgmma.cuh.
#pragma once
#include "config.cuh"
#include "types.cuh"

namespace fa::wgmma {

EMU_INLINE void fence() { emu::wgmma_fence(); }
EMU_INLINE void commit() { emu::wgmma_commit(); }
template <int Pending>
EMU_INLINE void wait() {
    emu::wgmma_wait(Pending);
}
template <int N>
EMU_INLINE void pin(float (&)[N]) {}

template <Dtype T, int N>
struct Mma {
    static_assert(T == Dtype::F16 || T == Dtype::Bf16);
    static constexpr emu::Element kElement = T == Dtype::Bf16 ? emu::Element::Bf16 : emu::Element::F16;
    template <int TransA, int TransB>
    EMU_INLINE static void ss(float (&d)[N / 2], u64 a, u64 b, int accumulate) {
        emu::wgmma({kElement, N, TransA != 0, TransB != 0, d, nullptr, a, b, accumulate != 0});
    }
    template <int TransB>
    EMU_INLINE static void rs(float (&d)[N / 2], const u32* a, u64 b, int accumulate) {
        emu::wgmma({kElement, N, false, TransB != 0, d, a, 0, b, accumulate != 0});
    }
};

}  // namespace fa::wgmma
