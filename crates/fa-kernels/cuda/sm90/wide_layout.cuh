// The layout of the SM90 forward for wide heads: tiles, wgmma shapes, registers, roles and shared memory.
#pragma once
#include "attn/programs.cuh"
#include "config.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/operand.cuh"
#include "tile/codes.cuh"
#include "tile/held_codes.cuh"
#include "tile/panel.cuh"
#include "tile/pipeline.cuh"
#include "tile/smem_tile.cuh"
#include "types.cuh"

namespace fa::wide {

template <Sm90WideConfig C>
struct Traits {
    static_assert(C.tile_m == 64, "one m64 of wgmma");
    static_assert(C.tile_n == 32 || C.tile_n == 64, "P is one panel");
    static_assert(C.tile_n == 64 || !C.gather, "a row of half a tile for each lane that looks up pages");
    static_assert(!C.latent || !C.overlap || C.kv_stages > 1, "S and P V read two tiles of latents");
    static_assert(C.head_dim % 64 == 0, "whole panels of Q and K");
    static_assert(C.head_dim_v % 128 == 0 && C.head_dim_v <= 512, "whole panels of O for each warpgroup");
    static_assert(!C.latent || C.head_dim >= C.head_dim_v, "K's rows begin with V's");
    static_assert(C.scheduler != Scheduler::Dynamic, "no tile is drawn from a counter");
    static_assert(C.varied || !C.paged, "the lengths of a cache in pages are on the device");
    static_assert(C.head_parts == 1 || C.pack_gqa, "parts of the heads that share a tile");

    // K and V are codes, which four warps load to registers and convert to the tiles (wide_codes.cuh).
    static constexpr bool kCodes = is_code(C.kv_dtype);
    static_assert(!kCodes || !C.gather);

    // Two warpgroups share the columns of O: the leader also computes S and P, the follower only its columns.
    static constexpr int kThreads = 256;               // of both
    static constexpr int kConsumerWarps = 8;           // of both
    static constexpr int kColumns = C.head_dim_v / 2;  // of O, of each

    // Registers per thread after setmaxnreg. Producers need more with lengths on the device and with the
    // gather; those that hold codes take what the follower, which has no scores, does without.
    static constexpr int kMoreRegs = C.gather ? 16 : C.varied ? 8 : 0;
    static constexpr int kProducerRegs = kCodes ? 136 : 24 + 2 * kMoreRegs;
    static constexpr int kLeaderRegs = kCodes ? 208 : 240 - kMoreRegs;
    static constexpr int kFollowerRegs = kCodes ? 160 : 240 - kMoreRegs;

    using Q = sm90::OperandTile<C.tile_m, C.head_dim>;
    using K = sm90::OperandTile<C.tile_n, C.head_dim>;
    using V = sm90::OperandTile<C.tile_n, C.head_dim_v>;
    using P = PanelTile<C.tile_m, C.tile_n>;
    // Latent form: K's panels that are not V's.
    static constexpr int kRopePanels = C.latent ? K::kPanels - V::kPanels : 0;
    using Rope = PanelTile<C.tile_n, 64 * max_of(kRopePanels, 1)>;

    // Warps that load keys in pages, and codes: by boxes of TMA or by copies. Without latents half of them
    // load K, and half V. Warps that signal the arrival of a tile: all that copy, or the one that announces
    // boxes.
    static constexpr int kPageWarps = 4;
    static constexpr int kMembers = C.latent ? kPageWarps : kPageWarps / 2;
    static constexpr int kLoadingWarps = C.gather || kCodes ? kMembers : 1;

    // Codes of some columns of a tile of keys, and of all.
    template <int Columns>
    using Codes = HeldCodes<SmemTile<C.tile_n, Columns, true>, 32 * kMembers, per_byte(C.kv_dtype)>;
    template <bool Values>
    using CodesOf = Codes<Values && !C.latent ? C.head_dim_v : C.head_dim>;

    // Bytes between the stages of K, or of V.
    template <bool Values>
    static constexpr u32 kStage = Values && !C.latent ? V::kBytes : K::kBytes;

    using MmaS = wgmma::Mma<C.dtype, C.tile_n>;
    using MmaO = wgmma::Mma<C.dtype, kColumns>;
};

// ---- Shared memory ------------------------------------------------------------------------------

// Tiles of V and their barriers. In the latent form they are the first panels of K's, and there are none.
template <int Bytes, int Stages>
struct VTiles {
    alignas(1024) u8 tiles[Stages][Bytes];
};
struct NoVTiles {};
struct NoVBarriers {};
// What the rows of K and of V in each stage are multiplied by, where they are codes.
template <int Stages, int TileN>
struct RowDescales {
    alignas(128) float of[Stages][2][TileN];
};
struct NoRowDescales {};

// The planner's account of sm90_wide names the same buffers in the same order; the generated unit asserts the
// size.
template <Sm90WideConfig C>
struct alignas(1024) SharedStorage {
    using T = Traits<C>;
    alignas(1024) u8 q[T::Q::kBytes];
    alignas(1024) u8 k[C.kv_stages][T::K::kBytes];
    [[no_unique_address]] Either<C.latent, NoVTiles, VTiles<T::V::kBytes, C.kv_stages>> v;
    alignas(1024) u8 p[T::P::kBytes];
    [[no_unique_address]] Either<T::kCodes, RowDescales<C.kv_stages, C.tile_n>, NoRowDescales> descales;
    // From the leader to the follower: the factor of each row of O, beside P of a step and at the end.
    alignas(128) float factor[C.tile_m];
    PipelineBarriers<1> q_bars;
    PipelineBarriers<C.kv_stages> k_bars;
    [[no_unique_address]] Either<C.latent, NoVBarriers, PipelineBarriers<C.kv_stages>> v_bars;

    // The first stage of V, and the barriers of its stages.
    __device__ __forceinline__ u8* values() {
        if constexpr (C.latent) {
            return k[0];
        } else {
            return v.tiles[0];
        }
    }
    __device__ __forceinline__ auto& value_bars() {
        if constexpr (C.latent) {
            return k_bars;
        } else {
            return v_bars;
        }
    }

    __device__ __forceinline__ void init_barriers() {
        q_bars.init(T::kConsumerWarps / 2);
        // The follower reads no K.
        k_bars.init(C.latent ? T::kConsumerWarps : T::kConsumerWarps / 2, T::kLoadingWarps);
        if constexpr (!C.latent) v_bars.init(T::kConsumerWarps, T::kLoadingWarps);
        mbarrier_init_fence();
    }
};

// Bytes between V's stages.
template <Sm90WideConfig C>
constexpr u32 kValueStage = Traits<C>::template kStage<true>;

}  // namespace fa::wide
