// What the warps of an SM90 backward share: the order of a step, named barriers, shared memory, and where
// their parts of dQ lie.
#pragma once
#include "attn/bwd_tile.cuh"
#include "config.cuh"
#include "params.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/bwd_layout.cuh"
#include "tile/pipeline.cuh"

namespace fa::sm90 {

// ---- Config -------------------------------------------------------------------------------------

template <Sm90BwdConfig C>
struct BwdTraits : BwdLayout<C> {
    static constexpr int kConsumers = 128 * C.num_wg;
    static constexpr int kConsumerWarps = 4 * C.num_wg;
    // Registers per thread after setmaxnreg: what the producers leave of 64K, in multiples of 8.
    // Coordinates of sequences that start anywhere spill wide panels' addresses.
    static constexpr bool kWideProducer = C.varied && !C.dq_via_smem;
    static constexpr int kProducerRegs = C.num_wg == 2 ? (kWideProducer ? 40 : 24) : 32;
    static constexpr int kConsumerRegs = C.num_wg == 2 ? (kWideProducer ? 232 : 240) : 160;
    static constexpr int kStatBytes = C.tile_m * 4;

    // The order of a step, as measured on an H100. Where products leave shared memory idle, dQ's buffer is
    // waited for before dQ's product and announced during the next step's; with tiles of 64 rows at head dim
    // 128, or P in shared memory, they do not. A short dV is issued after dS is stored: before, it would
    // delay what the other warpgroups wait for.
    static constexpr bool kShortDv = C.head_dim_v < 128;
    static constexpr bool kDqAhead = C.mma_dkv_is_rs && C.dq_via_smem && (kShortDv || C.tile_m > 64);
    static constexpr bool kStoreFirst = C.mma_dkv_is_rs && kShortDv;

    static_assert(!C.mma_dkv_is_rs || (C.sdp_swap_ab && !C.dkv_swap_ab && C.atom_layout_m_sdp == 1 &&
                                       C.atom_layout_n_dkv == C.num_wg),
                  "registers are an operand only of the warpgroup that computed them");
};

// Named barriers; 0 is cta_sync.
enum BwdBarrier : int { kPdsReady = 1, kPdsFree = 2, kDqReady = 3, kDqFree = 6 };

// ---- Shared memory ------------------------------------------------------------------------------

template <int Bytes, int Stages>
struct TileStages {
    alignas(1024) u8 tiles[Stages][Bytes];
};
struct NoTile {};

// The planner's account names the same buffers in the same order; the generated unit asserts the size.
template <Sm90BwdConfig C>
struct alignas(1024) BwdStorage {
    using T = BwdTraits<C>;
    alignas(1024) u8 q[C.q_stages][T::Q::kBytes];
    alignas(1024) u8 k[T::K::kBytes];
    alignas(1024) u8 v[T::V::kBytes];
    alignas(1024) u8 dout[C.do_stages][T::Do::kBytes];
    [[no_unique_address]] Either<C.mma_dkv_is_rs, NoTile, TileStages<T::Pds::kBytes, C.pds_stages>> p;
    alignas(1024) u8 ds[C.pds_stages][T::Pds::kBytes];
    [[no_unique_address]] Either<C.dq_via_smem, TileStages<T::DqOrder::kSlice * 4, 1>, NoTile> dq;
    alignas(128) float lse[C.do_stages][C.tile_m];
    alignas(128) float dpsum[C.do_stages][C.tile_m];
    Mbarrier k_full;
    Mbarrier v_full;
    PipelineBarriers<C.q_stages> q_bars;
    PipelineBarriers<C.do_stages> do_bars;
    int ticket;
};

template <Sm90BwdConfig C>
using Tile = BwdTileOf<C.varied>;

// ---- dQ -----------------------------------------------------------------------------------------

template <Sm90BwdConfig C>
__device__ __forceinline__ float* dq_share(const BwdParams& params, const Tile<C>& tile, int head,
                                           int m_block, int slice, int wg) {
    using T = BwdTraits<C>;
    return params.dq_accum + dq_tile(params, tile, head, m_block) * (C.tile_m * C.head_dim) +
           slice * T::DqOrder::kSlice + wg * T::DqOrder::kShare;
}

}  // namespace fa::sm90
