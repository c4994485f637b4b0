// The producer of the SM90 forward for wide heads and a cache of codes: warps load the codes of all columns
// of their rows to registers, before their tile is free, and store the numbers in the tiles that TMA would
// write.
#pragma once
#include "attn/code_rows.cuh"
#include "attn/descales.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/multiply.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "sm90/wide_layout.cuh"
#include "sm90/wide_load.cuh"
#include "sm90/wide_tiles.cuh"
#include "tile/codes.cuh"
#include "tile/pipeline.cuh"
#include "types.cuh"

namespace fa::wide {

// The columns of one tensor in a tile of keys.
template <Sm90WideConfig C, bool Values>
struct CodeColumns {
    using Rows = CodeRows<C.paged>;

    Rows rows;
    float of_head;  // the descale of rows that have none of their own
    int row_bytes;

    __device__ __forceinline__ CodeColumns(const FwdParams& params, const QueryTile<C>& work)
        : rows(Rows::of(params, Values ? params.v : params.k, descales(params), work.seqlen, work.tile.batch,
                        work.kv_head(params), C.head_parts)),
          of_head(head_descale(descales(params), work.tile.batch, work.kv_head(params))),
          row_bytes(columns(params.shape) / per_byte(C.kv_dtype)) {}

    __device__ __forceinline__ static const CodeDescales& descales(const FwdParams& params) {
        return Values ? cache_of(params).v : cache_of(params).k;
    }
    // Of the tensor: K of latents has those behind V's.
    __device__ __forceinline__ static int columns(const ShapeParams& shape) {
        if constexpr (Values) return shape.head_dim_v;
        return shape.head_dim - (C.latent ? shape.head_dim_v : 0);
    }
    // The descale of a row.
    __device__ __forceinline__ float descale(const typename Rows::Place& place) const {
        if (rows.descales == nullptr) return of_head;
        return place.at == kNowhere ? 0.f : rows.descales[place.row * rows.heads];
    }
};

// The loop of a warp, the `member`-th of those that load the same tensor, or of all in the latent form: holds
// the codes of some rows until their stage is free.
template <Sm90WideConfig C, bool Values>
__device__ __forceinline__ void produce_codes(SharedStorage<C>& smem, const FwdParams& params,
                                              const TensorMap& map_q, int member) {
    using T = Traits<C>;
    using Tile = typename T::template CodesOf<Values>;
    static_assert(!C.latent || Values, "latents are V's");
    constexpr bool kRope = C.latent && T::kRopePanels > 0;
    // Panels of a tile whose rows have V's descales.
    constexpr int kValuePanels = Values ? T::V::kPanels : 0;
    // Of the tensor whose rows have the panels from 0 on.
    constexpr int kOwnPanels = C.latent ? kValuePanels : Tile::kPanels;
    PipelineState<1> q_state;
    PipelineState<C.kv_stages> state;
    const int thread = 32 * member + lane_index();
    const bool has_rows = Tile::has_rows(thread), leads = thread % Tile::kLanes == 0 && has_rows;
    auto& bars = [&]() -> auto& {
        if constexpr (Values) {
            return smem.value_bars();
        } else {
            return smem.k_bars;
        }
    }();
    u8* const tiles = Values ? smem.values() : smem.k[0];
    const bool loads_q = Values && member == T::kMembers - 1 && lane_index() == 0;

    for_each_loaded<C>(params, [&](const QueryTile<C>& work) {
        const CodeColumns<C, Values> columns(params, work);
        [[maybe_unused]] const CodeColumns<C, false> rope(params, work);
        const bool scales = C.latent ? scales_latents(params, work.tile.batch, work.kv_head(params))
                                     : columns.rows.descales != nullptr;
        const bool whole =
            columns.row_bytes % Tile::kUnit == 0 && (!kRope || rope.row_bytes % Tile::kUnit == 0);
        Tile codes;
        int entries[Tile::kHeld];  // of the page table, of the rows that are loaded next
        auto key_of = [&](int n_block, int part, int i) {
            return n_block * C.tile_n + Tile::row(thread, part, i);
        };
        auto look_up = [&](int n_block, int part) {
#pragma unroll
            for (int i = 0; i < Tile::kHeld; ++i)
                entries[i] = columns.rows.entry_of(key_of(n_block, part, i));
        };
        // Loads the rows, and their descales, which the lanes of a row share.
        auto load = [&]<bool Whole>(int n_block, int part) {
#pragma unroll
            for (int i = 0; i < Tile::kHeld; ++i) {
                const int key = key_of(n_block, part, i);
                const auto place = columns.rows.place_of(key, entries[i], Values == C.latent && leads);
                const bool exists = place.at != kNowhere && has_rows;
                float* const own = smem.descales.of[state.stage][0] + Tile::row(thread, part, i);
                codes.template load<0, kOwnPanels, Whole>(
                    i, bytes_after(columns.rows.first, exists ? place.at : 0, 16), exists, columns.row_bytes,
                    thread);
                if (scales && leads) own[Values ? C.tile_n : 0] = columns.descale(place);
                if constexpr (kRope) {
                    const auto further = rope.rows.place_of(key, entries[i], false);
                    codes.template load<kOwnPanels, T::kRopePanels, Whole>(
                        i, bytes_after(rope.rows.first, exists ? further.at : 0, 16), exists, rope.row_bytes,
                        thread);
                    if (scales && leads) own[0] = rope.descale(further);
                }
            }
        };

        const int last = work.range.end - 1;
        look_up(work.blocks.at(last), 0);
#pragma unroll 1
        for (int i = last; i >= work.range.begin; --i) {
            const int n_block = work.blocks.at(i);
#pragma unroll 1
            for (int part = 0; part < Tile::kParts; ++part) {
                if (whole) {
                    load.template operator()<true>(n_block, part);
                } else {
                    load.template operator()<false>(n_block, part);
                }
                if (part + 1 < Tile::kParts) {
                    look_up(n_block, part + 1);
                } else if (i > work.range.begin) {
                    look_up(work.blocks.at(i - 1), 0);
                }
                // Their buffer is free once consumers are done with the previous work tile.
                if (loads_q && i == last && part == 0) load_q<C>(smem, params, map_q, q_state, work);
                const bool general = scales || warp_any(codes.template hides<C.kv_dtype, C.dtype>());
                if (part == 0) bars.wait_empty(state);
                // The rows' descales were written by other lanes.
                warp_sync();
                if (!has_rows) continue;
                u8* const tile = tiles + state.stage * T::template kStage<Values> + part * Tile::kPartBytes;
                if (general) {
                    const float* const own = smem.descales.of[state.stage][0] + Tile::row(thread, part, 0);
                    codes.template convert_any<C.kv_dtype, C.dtype>(tile, thread, [&](int i, int panel) {
                        const int of = (panel < kValuePanels ? C.tile_n : 0) + i * Tile::kSweep;
                        return scales ? own[of] : 1.f;
                    });
                } else {
                    codes.template convert<C.kv_dtype, C.dtype>(tile, thread);
                }
            }
            fence_async_shared();
            warp_sync();
            if (lane_index() == 0) mbarrier_arrive(bars.full[state.stage]);
            state.advance();
        }
    });
}

template <Sm90WideConfig C>
__device__ __forceinline__ void load_codes(SharedStorage<C>& smem, const FwdParams& params,
                                           const TensorMap& map_q, int warp) {
    if constexpr (C.latent) {
        produce_codes<C, true>(smem, params, map_q, warp);
    } else if (warp < Traits<C>::kMembers) {
        produce_codes<C, false>(smem, params, map_q, warp);
    } else {
        produce_codes<C, true>(smem, params, map_q, warp - Traits<C>::kMembers);
    }
}

}  // namespace fa::wide
