// The layout of the SM90 forward of e4m3 tensors: tiles, wgmma shapes, registers and shared memory.
#pragma once
#include "config.cuh"
#include "ptx/e4m3.cuh"
#include "sm90/fwd_layout.cuh"
#include "tile/byte_panel.cuh"
#include "tile/pipeline.cuh"
#include "tile/transpose_bytes.cuh"

namespace fa::sm90 {

template <Sm90FwdFp8Config C>
struct Fp8Traits {
    static_assert(C.dtype == Dtype::E4m3 && (C.out_dtype == Dtype::F16 || C.out_dtype == Dtype::Bf16));
    static_assert(C.tile_m == 64 * C.num_wg, "one warpgroup per 64 rows: the m64 of wgmma");
    static_assert(C.tile_n % 32 == 0 && C.tile_n <= 256, "the n of wgmma and the k32 steps of P V");
    static_assert(C.head_dim % 32 == 0 && C.head_dim_v % 32 == 0 && C.head_dim_v <= 256);
    static_assert(C.head_dim_v % C.slice == 0);
    static_assert(C.num_wg >= 2 || !C.ping_pong);
    static_assert(C.varied || !C.paged, "the lengths of a cache in pages are on the device");

    static constexpr int kConsumerWarps = 4 * C.num_wg;
    static constexpr int kProducerWarps = 4;
    // Registers per thread after setmaxnreg; the producers transpose V, and need more with lengths on the
    // device.
    static constexpr int kMoreRegs = C.varied && C.num_wg > 1 ? 8 : 0;
    static constexpr int kProducerRegs = (C.num_wg == 1   ? 56
                                          : C.num_wg == 2 ? 40
                                                          : 56) +
                                         C.num_wg * kMoreRegs;
    static constexpr int kConsumerRegs = (C.num_wg == 1 ? 256 : C.num_wg == 2 ? 232 : 152) - kMoreRegs;

    using Q = BytePanelTile<C.tile_m, C.head_dim>;
    using K = BytePanelTile<C.tile_n, C.head_dim>;
    using V = BytePanelTile<C.tile_n, C.head_dim_v>;
    using Vt = BytePanelTile<C.head_dim_v, C.tile_n>;
    using Transposer = ByteTransposer<C.tile_n, C.head_dim_v>;

    using MmaS = wgmma::MmaE4m3<C.tile_n>;
    using MmaO = wgmma::MmaE4m3<C.slice>;
    static constexpr int kSlices = C.head_dim_v / C.slice;
};

// P is at most 2^8, of e4m3's 448: numbers down to 2^-17 of the largest are not lost.
constexpr int kP8Offset = 8;

// The planner's sm90_fwd_fp8 smem names the same buffers in the same order; the generated unit asserts the
// size.
template <Sm90FwdFp8Config C>
struct alignas(1024) Fp8Storage {
    using T = Fp8Traits<C>;
    alignas(1024) u8 q[C.q_stages][T::Q::kBytes];
    alignas(1024) u8 k[C.kv_stages][T::K::kBytes];
    alignas(1024) u8 vt[C.kv_stages][T::Vt::kBytes];  // V transposed
    alignas(1024) u8 v[C.v_stages][T::V::kBytes];     // V as it is loaded
    PipelineBarriers<C.q_stages> q_bars;
    PipelineBarriers<C.kv_stages> k_bars;
    PipelineBarriers<C.kv_stages> vt_bars;
    PipelineBarriers<C.v_stages> v_bars;
    [[no_unique_address]] Either<C.scheduler == Scheduler::Dynamic, TileTicket<C.varied>, NoTileTicket>
        ticket;
};

}  // namespace fa::sm90
