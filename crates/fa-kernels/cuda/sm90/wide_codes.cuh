// The producer of the SM90 forward for wide heads and a cache of codes: warps copy the codes of all columns
// of their rows by cp.async into the tiles that TMA would write, and convert them there.
#pragma once
#include "attn/code_rows.cuh"
#include "attn/descales.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
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

// The columns of one tensor in a tile of keys. A thread has the same rows in all of its panels, and looks up
// where they are by itself.
template <Sm90WideConfig C, bool Values>
struct CodeColumns {
    using T = Traits<C>;
    using Codes = Either<Values, typename T::ValueCodes, typename T::KeyCodes>;
    using Rows = CodeRows<C.paged>;

    // The page table's entries of the thread's rows.
    struct Entries {
        int of[Codes::kSweeps];
    };

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
    __device__ __forceinline__ static int key_of(int thread, int sweep, int n_block) {
        return n_block * C.tile_n + Codes::row(thread, sweep);
    }
    __device__ __forceinline__ Entries entries_of(int thread, int n_block) const {
        Entries entries;
#pragma unroll
        for (int sweep = 0; sweep < Codes::kSweeps; ++sweep)
            entries.of[sweep] = rows.entry_of(key_of(thread, sweep, n_block));
        return entries;
    }

    // Starts to copy tile `n_block` to `tile`, and with `scales` the descale of each row to `to`, whose
    // readers are the lanes that share the row. `counts`: the tensor's missing pages are counted.
    template <class AnyEntries>
    __device__ __forceinline__ void start(u32 tile, float* to, bool scales, bool counts, int thread,
                                          int n_block, const AnyEntries& entries) const {
        const bool leads = thread % Codes::kLanes == 0;
        Codes::start(tile, thread, rows.first, row_bytes, [&](int sweep) {
            const auto place =
                rows.place_of(key_of(thread, sweep, n_block), entries.of[sweep], counts && leads);
            if (scales && leads) {
                float* const own = to + Codes::row(thread, sweep);
                if (rows.descales != nullptr) {
                    rows.copy_descale(smem_address(own), place);
                } else {
                    *own = of_head;
                }
            }
            return place.at;
        });
    }
};

// The loop of a warp, the `member`-th of those that load the same tensor, or of all in the latent form:
// copies a tile to a stage that is free, and converts it before it waits for the stage that its use will
// free.
template <Sm90WideConfig C, bool Values>
__device__ __forceinline__ void produce_codes(SharedStorage<C>& smem, const FwdParams& params,
                                              const TensorMap& map_q, int member) {
    using T = Traits<C>;
    using Columns = CodeColumns<C, Values>;
    using Rope = CodeColumns<C, false>;
    using Tile = typename T::template CodesOf<Values>;
    constexpr bool kRope = C.latent && T::kRopePanels > 0;
    // Panels of a tile whose rows have V's descales.
    constexpr int kValuePanels = Values ? T::V::kPanels : 0;
    static_assert(!C.latent || Values, "latents are V's");
    PipelineState<1> q_state;
    PipelineState<C.kv_stages> started, converted;
    int unused = C.kv_stages;  // stages that nothing was copied to yet
    int pending = 0;           // tiles that are copied but not converted
    u32 scaled = 0;            // stages, as bits, whose numbers are multiplied where they are converted
    const int thread = 32 * member + lane_index();
    auto& bars = [&]() -> auto& {
        if constexpr (Values) {
            return smem.value_bars();
        } else {
            return smem.k_bars;
        }
    }();
    u8* const tiles = Values ? smem.values() : smem.k[0];
    constexpr u32 kStage = T::template kStage<Values>;
    const bool loads_q = Values && member == T::kMembers - 1;

    // Converts the oldest tiles, until `left` are pending.
    auto convert = [&](int left) {
#pragma unroll 1
        for (; pending > left; --pending) {
            if (pending > 1) {
                cp_async_wait<1>();
            } else {
                cp_async_wait<0>();
            }
            // The rows' descales were written by other lanes.
            warp_sync();
            const int stage = converted.stage;
            u8* const tile = tiles + stage * kStage;
            if (scaled >> stage & 1) {
                Tile::template convert<C.kv_dtype, C.dtype, kValuePanels, true>(tile, thread,
                                                                                smem.descales.of[stage][0]);
            } else {
                Tile::template convert<C.kv_dtype, C.dtype, kValuePanels, false>(tile, thread, nullptr);
            }
            fence_async_shared();
            warp_sync();
            if (lane_index() == 0) mbarrier_arrive(bars.full[stage]);
            converted.advance();
        }
    };

    for_each_loaded<C>(params, [&](const QueryTile<C>& work) {
        const Columns columns(params, work);
        [[maybe_unused]] const Rope rope(params, work);
        const bool scales = C.latent ? scales_latents(params, work.tile.batch, work.kv_head(params))
                                     : columns.rows.descales != nullptr;
        const int last = work.range.end - 1;
        auto entries = columns.entries_of(thread, work.blocks.at(last));
#pragma unroll 1
        for (int i = last; i >= work.range.begin; --i) {
            // A stage is free once consumers are done with its tile, and wait for the next. The queries are
            // once they are done with all tiles of the previous work tile.
            const int n_block = work.blocks.at(i);
            const bool loads_q_now = loads_q && i == last;
            convert(loads_q_now ? 0 : unused > 0 ? C.kv_stages - 1 : max_of(C.kv_stages - 2, 0));
            if (unused > 0) --unused;
            const int to = started.stage;
            bars.wait_empty(started);
            const u32 tile = smem_address(tiles + to * kStage);
            columns.start(tile, smem.descales.of[to][Values], scales, Values == C.latent, thread, n_block,
                          entries);
            if constexpr (kRope) {
                rope.start(tile + T::V::kBytes, smem.descales.of[to][0], scales, false, thread, n_block,
                           entries);
            }
            cp_async_commit();
            scaled = scaled & ~(1u << to) | u32(scales) << to;
            started.advance();
            ++pending;
            if (loads_q_now && lane_index() == 0) load_q<C>(smem, params, map_q, q_state, work);
            // In flight while the oldest tile is converted.
            if (i > work.range.begin) entries = columns.entries_of(thread, work.blocks.at(i - 1));
        }
    });
    convert(0);
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
