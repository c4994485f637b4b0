// The SM100 forward's layout: warp roles, tensor memory and shared memory.
#pragma once
#include "config.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/panel.cuh"
#include "tile/pipeline.cuh"
#include "types.cuh"

namespace fa::sm100 {

__host__ __device__ constexpr int power_of_two_from(int n) {
    int power = 32;
    while (power < n) power *= 2;
    return power;
}

template <Sm100FwdConfig C>
struct Traits {
    static constexpr int kRows = 128;  // rows of a tile of queries: the lanes of tensor memory
    static constexpr int kTiles = C.q_tiles;
    static_assert(C.tile_m == kRows * kTiles, "tiles of 128 queries");
    static_assert(C.tile_n % 32 == 0 && C.tile_n <= 128, "a thread holds its row of S in pieces of 32");
    static_assert(C.head_dim % 32 == 0 && C.head_dim_v % 32 == 0 && C.head_dim_v <= 256);
    static_assert(C.kv_stages >= 2, "V of a step and K of the next are read together");
    static_assert(C.scheduler != Scheduler::Dynamic);
    static_assert(!C.paged && !C.split);

    // Warps by role: a warpgroup per tile for softmax, a warpgroup for correction, one warp for products
    // (MMA) and one for loads; two are idle.
    static constexpr int kSoftmaxWarps = 4 * kTiles;
    static constexpr int kProductWarp = kSoftmaxWarps + 4;
    static constexpr int kLoadWarp = kSoftmaxWarps + 5;
    static constexpr int kSoftmaxRegs = 184, kCorrectionRegs = 80, kOtherRegs = 64;

    using Q = PanelTile<kRows, C.head_dim>;
    using K = PanelTile<C.tile_n, C.head_dim>;
    using V = PanelTile<C.tile_n, C.head_dim_v>;
    static constexpr int kSlotBytes = max_of(K::kBytes, V::kBytes);

    // Columns of tensor memory: S of each tile, with P in its upper half, then O of each tile.
    __host__ __device__ static constexpr u32 s(int tile) { return tile * C.tile_n; }
    __host__ __device__ static constexpr u32 p(int tile) { return s(tile) + C.tile_n / 2; }
    __host__ __device__ static constexpr u32 o(int tile) { return kTiles * C.tile_n + tile * C.head_dim_v; }
    static constexpr int kColumns = power_of_two_from(o(kTiles));
    static_assert(kColumns <= 512, "S and O fit tensor memory");
};

// ---- Shared memory ------------------------------------------------------------------------------

// The planner's account of sm100_fwd names the same buffers in the same order; the generated unit asserts the
// size.
template <Sm100FwdConfig C>
struct alignas(1024) SharedStorage {
    using T = Traits<C>;
    alignas(1024) u8 q[T::kTiles][T::Q::kBytes];
    alignas(1024) u8 kv[C.kv_stages][T::kSlotBytes];  // K and V of a step, in turn
    // From softmax to correction: the factor of each row of O.
    alignas(128) float scale[T::kTiles][T::kRows];
    // Q has arrived; the last S that reads Q is done.
    Mbarrier q_full[T::kTiles], q_empty[T::kTiles];
    // S and all earlier products are done; P is stored and O rescaled; P V and all earlier products are done.
    Mbarrier s_full[T::kTiles], p_full[T::kTiles], o_full[T::kTiles];
    Mbarrier scale_full[T::kTiles], scale_empty[T::kTiles];
    PipelineBarriers<C.kv_stages> kv_bars;
    alignas(16) u32 tensor;  // the address of tensor memory

    __device__ __forceinline__ void init_barriers() {
        for (int tile = 0; tile < T::kTiles; ++tile) {
            mbarrier_init(q_full[tile], 1);
            mbarrier_init(q_empty[tile], 1);
            mbarrier_init(s_full[tile], 1);
            mbarrier_init(p_full[tile], 8);  // warps of softmax and correction
            mbarrier_init(o_full[tile], 1);
            mbarrier_init(scale_full[tile], 4);
            mbarrier_init(scale_empty[tile], 4);
        }
        kv_bars.init(1);
        mbarrier_init_fence();
    }
};

// A role's position at a barrier that is used once per step: the parity of its next phase.
struct Turn {
    u32 phase = 0;

    __device__ __forceinline__ void wait(Mbarrier& bar) {
        mbarrier_wait(bar, phase);
        phase ^= 1;
    }
    // Waits until a buffer is free; the first round does not wait, since buffers start free.
    __device__ __forceinline__ void wait_free(Mbarrier& bar) {
        mbarrier_wait(bar, phase ^ 1);
        phase ^= 1;
    }
};

}  // namespace fa::sm100
