// The SM90 forward's layout: tiles, wgmma shapes, registers, producer warps and shared memory.
#pragma once
#include "attn/ahead_copies.cuh"
#include "attn/programs.cuh"
#include "config.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/operand.cuh"
#include "tile/codes.cuh"
#include "tile/panel.cuh"
#include "tile/pipeline.cuh"
#include "tile/smem_tile.cuh"

namespace fa::sm90 {

// CTAs that share a tile's keys may be a cluster, which combines in shared memory (fwd_combine.cuh). A
// wider O leaves no registers for it.
template <class Config>
__host__ __device__ constexpr bool parts_in_clusters(const Config& config) {
    return config.split && !config.varied && config.head_dim_v <= 128;
}

template <Sm90FwdConfig C>
struct Traits {
    static_assert(C.tile_m == 64 * C.num_wg, "one warpgroup per 64 rows: the m64 of wgmma");
    static_assert(C.tile_n % 16 == 0 && C.tile_n <= 256, "the n of wgmma and the k16 steps of P V");
    static_assert(C.head_dim % 16 == 0 && C.head_dim_v % 16 == 0 && C.head_dim_v <= 256);
    static_assert(C.cluster_m == 1 || C.mask == MaskKind::Full, "CTAs of a cluster share their keys");
    static_assert(C.cluster_m == 1 || C.scheduler != Scheduler::Dynamic,
                  "CTAs of a cluster take neighbouring tiles");
    static_assert(C.num_wg >= 2 || !C.ping_pong);
    static_assert(C.cluster_m == 1 || (!C.varied && !C.split), "CTAs of a cluster load the same keys");
    static_assert(C.varied || !C.paged, "the lengths of a cache in pages are on the device");

    // K and V are codes, which four warps copy to stages of their own and convert (fwd_codes.cuh).
    static constexpr bool kCodes = is_code(C.kv_dtype);
    static_assert(!kCodes || (!C.gather && C.cluster_m == 1 && C.tile_n % 32 == 0 && C.tile_n >= 64));

    static constexpr bool kPartsInClusters = parts_in_clusters(C);

    // A wide O is rescaled before P V is issued, while S runs.
    static constexpr bool kRescaleFirst = C.head_dim_v > 128;

    static constexpr int kConsumerWarps = 4 * C.num_wg;
    // Registers per thread after setmaxnreg: the consumers get what the producers leave of 64K, in multiples
    // of 8. Producers need more with lengths on the device, with the gather and with codes.
    static constexpr int kMoreRegs = C.num_wg == 1               ? 0
                                     : kCodes                    ? (C.num_wg == 3        ? 16
                                                                    : C.head_dim_v > 128 ? 24
                                                                                         : 32)
                                     : C.gather                  ? (C.num_wg == 2 ? 16 : 8)
                                     : C.varied && C.num_wg == 2 ? 8
                                                                 : 0;
    // CTAs that share an SM have an equal part each: so many registers of a thread of every warpgroup.
    static constexpr bool kShares = C.blocks_per_sm > 1;
    static constexpr int kPart = 65536 / (128 * (C.num_wg + 1) * C.blocks_per_sm) / 8 * 8 * (C.num_wg + 1);
    static_assert(!kShares || (C.num_wg < 3 && C.cluster_m == 1 && !C.gather && !kCodes));
    static constexpr int kProducerRegs = kShares ? (C.varied ? 40 : 24)
                                                 : (C.num_wg == 1   ? (C.gather || kCodes ? 96 : 56)
                                                    : C.num_wg == 2 ? 24
                                                                    : 32) +
                                                       C.num_wg * kMoreRegs;
    static constexpr int kConsumerRegs = kShares ? (kPart - kProducerRegs) / C.num_wg / 8 * 8
                                                 : (C.num_wg == 1   ? 256
                                                    : C.num_wg == 2 ? 240
                                                                    : 160) -
                                                       kMoreRegs;

    using Q = OperandTile<C.tile_m, C.head_dim>;
    using K = OperandTile<C.tile_n, C.head_dim>;
    using V = OperandTile<C.tile_n, C.head_dim_v>;
    using P = PanelTile<64, C.tile_n>;  // one per warpgroup

    // Codes of half a tile, which a warp copies and converts.
    template <class Kv>
    using Codes =
        CodeTile<SmemTile<C.tile_n, Kv::kPanel * Kv::kPanels, true>, C.tile_n / 2, 32, per_byte(C.kv_dtype)>;

    // With keys in pages, and with codes: warps that load K, and as many that load V; all producer warps; and
    // warps that signal that a tile of K, or of V, has arrived.
    static constexpr int kPageWarps = C.gather || kCodes || max_of(K::kPanels, V::kPanels) > 1 ? 2 : 1;
    static constexpr int kProducerWarps = C.paged || kCodes ? 2 * kPageWarps : 1;
    static constexpr int kLoadingWarps = C.gather || kCodes ? kPageWarps : 1;

    // Enumerators, which are no symbols of a cubin.
    enum : bool {
        // Whether what was copied is read before the wait for S: at head dim 64 exponentials leave no
        // registers for it, and wider products more time.
        kReadsCopiesAhead = copies_ahead() && C.num_wg < 3 && C.head_dim_v >= 128,
        // Whether an additive change makes what it takes of the rows before the wait for S.
        kRowsAhead = kScoreProgram && Mods::kAdditive && ahead_form() == AheadForm::None
    };

    // What a consumer's warp copies of an array that its program reads ahead: by whole lines, which take more
    // instructions, where it is read behind the wait for S.
    using Copies = AheadOfRows<ScorePlace<false, C.pack_gqa>, C.tile_n / 2, !kReadsCopiesAhead>;

    using MmaS = wgmma::Mma<C.dtype, C.tile_n>;
    using MmaO = wgmma::Mma<C.dtype, C.head_dim_v>;
};

// ---- Shared memory ------------------------------------------------------------------------------

// Optional buffers take no space in configs without them.
template <int Bytes, int Groups>
struct PTiles {
    alignas(1024) u8 tiles[Groups][Bytes];
};
struct NoPTiles {};
template <int KBytes, int VBytes, int Stages, int TileN>
struct CodeStages {
    alignas(128) u8 k[Stages][2][KBytes];  // each half of a tile's rows
    alignas(128) u8 v[Stages][2][VBytes];
    alignas(128) float descales[Stages][2][TileN];  // of the rows of K and V
};
struct NoCodeStages {};
template <bool Varied>
struct TileTicket {
    PipelineBarriers<1> bars;
    alignas(16) int next[Varied ? 12 : 4];  // its number; with device lengths also the tile itself
};
struct NoTileTicket {};

// The planner's sm90_fwd_smem names the same buffers in the same order; the generated unit asserts the size.
template <Sm90FwdConfig C>
struct alignas(1024) SharedStorage {
    using T = Traits<C>;
    alignas(1024) u8 q[C.q_stages][T::Q::kBytes];
    alignas(1024) u8 k[C.kv_stages][T::K::kBytes];
    alignas(1024) u8 v[C.kv_stages][T::V::kBytes];
    [[no_unique_address]] Either<C.pv_is_rs, NoPTiles, PTiles<T::P::kBytes, C.num_wg>> p;
    [[no_unique_address]] Either<
        T::kCodes,
        CodeStages<T::template Codes<typename T::K>::kBytes, T::template Codes<typename T::V>::kBytes,
                   max_of(C.code_stages, 1), C.tile_n>,
        NoCodeStages> codes;
    [[no_unique_address]] AheadTiles<typename T::Copies, T::kConsumerWarps> ahead;
    PipelineBarriers<C.q_stages> q_bars;
    PipelineBarriers<C.kv_stages, C.cluster_m> k_bars;
    PipelineBarriers<C.kv_stages, C.cluster_m> v_bars;
    [[no_unique_address]] Either<C.scheduler == Scheduler::Dynamic, TileTicket<C.varied>, NoTileTicket>
        ticket;
};

// The barriers of V's stages if `Values`, else of K's.
template <bool Values, Sm90FwdConfig C>
__device__ __forceinline__ auto& kv_bars(SharedStorage<C>& smem) {
    if constexpr (Values) {
        return smem.v_bars;
    } else {
        return smem.k_bars;
    }
}

}  // namespace fa::sm90
