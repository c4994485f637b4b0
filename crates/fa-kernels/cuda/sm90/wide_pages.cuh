// The producers of the SM90 forward for wide heads and keys in pages: four warps issue the boxes of TMA, one
// part of a page for each lane, or copy rows by cp.async.
#pragma once
#include "attn/paged_keys.cuh"
#include "attn/tensor_view.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "sm90/fwd_gather.cuh"
#include "sm90/wide_layout.cuh"
#include "sm90/wide_load.cuh"
#include "sm90/wide_tiles.cuh"
#include "tile/pipeline.cuh"
#include "types.cuh"

namespace fa::wide {

// The loop of a warp, one of `Members` that divide the panels of a tile among them: the latent form's, or
// with `Values` V's, else K's. Warp 0 of those that load V loads Q.
template <Sm90WideConfig C, bool Values>
__device__ __forceinline__ void load_boxes(SharedStorage<C>& smem, const FwdParams& params,
                                           const TensorMap& map_q, const TensorMap& map_k,
                                           const TensorMap& map_v, int member) {
    using T = Traits<C>;
    using Tile = Either<C.latent || !Values, typename T::K, typename T::V>;
    using Boxes = Either<C.latent || Values, typename T::V, typename T::K>;
    constexpr int kMembers = T::kMembers;
    PipelineState<1> q_state;
    PipelineState<C.kv_stages> state;
    auto& bars = [&]() -> auto& {
        if constexpr (Values) {
            return smem.value_bars();
        } else {
            return smem.k_bars;
        }
    }();
    const bool leads = member == 0 && lane_index() == 0;
    // A warp without panels must not wait for stages: nothing waits for it, so it could miss a whole phase.
    const bool loads = member < Boxes::kPanels;
    for_each_loaded<C>(params, [&](const QueryTile<C>& work) {
        if (!loads) return;
        if ((C.latent || Values) && leads) load_q<C>(smem, params, map_q, q_state, work);
        const PagedKeys<C.tile_n> keys{params.varlen, work.table(params), work.seqlen.k(),
                                       work.kv_head(params), 0};
        int entry = keys.entry_of(work.blocks.at(work.range.end - 1));
#pragma unroll 1
        for (int i = work.range.end - 1; i >= work.range.begin; --i) {
            const int n_block = work.blocks.at(i);
            // In flight while the warp waits for a stage.
            const int before = keys.entry_of(work.blocks.at(max(i - 1, work.range.begin)));
            u8* const dst = (Values ? smem.values() : smem.k[0]) + state.stage * Tile::kBytes;
            bars.wait_empty(state);
            // No lane may start the next phase before all lanes have seen the previous one end. Boxes may
            // arrive before their bytes are announced, from the other warps too.
            warp_sync();
            if (leads) bars.announce(state, Tile::kBytes);
            Mbarrier& full = bars.full[state.stage];
            keys.template load<Boxes, kMembers>(
                dst, C.latent || Values ? map_v : map_k,
                C.latent || Values ? params.varlen.tma_v : params.varlen.tma_k, full, n_block, entry, member,
                !Values && member == 0);
            if constexpr (C.latent && T::kRopePanels > 0) {
                // From the last warp on, which has the fewest panels of latents.
                const int further = (member + 1) % kMembers;
                keys.template load<typename T::Rope, kMembers>(dst + T::V::kBytes, map_k, params.varlen.tma_k,
                                                               full, n_block, entry, further, false);
            }
            state.advance();
            entry = before;
        }
    });
}

template <Sm90WideConfig C>
__device__ __forceinline__ void produce_pages(SharedStorage<C>& smem, const FwdParams& params,
                                              const TensorMap& map_q, const TensorMap& map_k,
                                              const TensorMap& map_v, int warp) {
    if constexpr (C.latent) {
        load_boxes<C, false>(smem, params, map_q, map_k, map_v, warp);
    } else if (warp < Traits<C>::kMembers) {
        load_boxes<C, false>(smem, params, map_q, map_k, map_v, warp);
    } else {
        load_boxes<C, true>(smem, params, map_q, map_k, map_v, warp - Traits<C>::kMembers);
    }
}

// How many tiles before the newest a warp may have in flight without having signalled them: not one whose
// consumption frees the stage that it waits for next. With overlap a tile of latents is free only after the
// next one's S.
template <Sm90WideConfig C>
constexpr int kUnsignalled = min_of(2, C.kv_stages - (C.latent && C.overlap ? 2 : 1));

// Panels of a tensor of keys that a warp copies: from panel `First` of the tensor on, for half of a tile's
// rows, as all of `Tile`.
template <Sm90WideConfig C, class Tile, int First>
struct CopiedPanels {
    using Keys = sm90::GatheredKeys<C.tile_n, 8>;

    // Starts to copy tile `n_block`, whose rows have the page table's `entries`, to `dst`.
    template <bool Counts>
    __device__ __forceinline__ static void start(u8* dst, const FwdParams& params, const ConstTensor& tensor,
                                                 const TmaStrides& strides, int columns,
                                                 const QueryTile<C>& work, int n_block,
                                                 const typename Keys::Entries& entries) {
        const Keys keys{params.varlen, strides, nullptr, work.seqlen.k(), 0, Keys::own_lookup()};
        const typename Keys::Rows rows = keys.template rows_of<Counts>(n_block, entries);
        const int column = 64 * First + Keys::lane_column();
        const u16* const cache = view(tensor).row(0, 0, work.kv_head(params)) + column;
        Keys::template start<Tile, false>(Keys::template lane_target<Tile>(smem_address(dst)), cache,
                                          sm90::stride_unit(strides, tensor.strides), column, columns, rows);
    }
};

// The loop of a warp that copies half of the rows of a tile: in the latent form the first half of V's
// columns, or with `Second` the second half and the further columns of K; else K, or V. The last warp loads
// Q.
template <Sm90WideConfig C, bool Second>
__device__ __forceinline__ void copy_rows(SharedStorage<C>& smem, const FwdParams& params,
                                          const TensorMap& map_q, bool loads_q) {
    using T = Traits<C>;
    using Keys = sm90::GatheredKeys<C.tile_n, 8>;
    PipelineState<1> q_state;
    PipelineState<C.kv_stages> state;
    auto& bars = [&]() -> auto& {
        if constexpr (Second) {
            return smem.value_bars();
        } else {
            return smem.k_bars;
        }
    }();
    sm90::CopiedTiles<kUnsignalled<C>> copied;
    const VarlenParams& varlen = params.varlen;
    for_each_loaded<C>(params, [&](const QueryTile<C>& work) {
        if (loads_q) load_q<C>(smem, params, map_q, q_state, work);
        const Keys keys{varlen, varlen.tma_v, work.table(params), work.seqlen.k(), 0, Keys::own_lookup()};
        typename Keys::Entries entries = keys.entries_of(work.blocks.at(work.range.end - 1));
#pragma unroll 1
        for (int i = work.range.end - 1; i >= work.range.begin; --i) {
            const int n_block = work.blocks.at(i);
            // In flight while this tile is copied.
            const typename Keys::Entries before =
                keys.entries_of(work.blocks.at(max(i - 1, work.range.begin)));
            bars.wait_empty(state);
            u8* const k = smem.k[state.stage];
            if constexpr (C.latent) {
                constexpr int kHalf = T::V::kPanels / 2;
                using Half = PanelTile<C.tile_n, 64 * kHalf>;
                CopiedPanels<C, Half, Second ? kHalf : 0>::template start<!Second>(
                    k + (Second ? Half::kBytes : 0), params, params.v, varlen.tma_v, params.shape.head_dim_v,
                    work, n_block, entries);
                if constexpr (Second && T::kRopePanels > 0) {
                    CopiedPanels<C, typename T::Rope, 0>::template start<false>(
                        k + T::V::kBytes, params, params.k, varlen.tma_k,
                        params.shape.head_dim - params.shape.head_dim_v, work, n_block, entries);
                }
            } else if constexpr (Second) {
                CopiedPanels<C, typename T::V, 0>::template start<false>(
                    smem.values() + state.stage * T::V::kBytes, params, params.v, varlen.tma_v,
                    params.shape.head_dim_v, work, n_block, entries);
            } else {
                CopiedPanels<C, typename T::K, 0>::template start<true>(
                    k, params, params.k, varlen.tma_k, params.shape.head_dim, work, n_block, entries);
            }
            copied.started(bars, state.stage);
            state.advance();
            entries = before;
        }
        // The next work tile's queries, and tiles of keys, wait for what these free.
        copied.finish(bars);
    });
}

template <Sm90WideConfig C>
__device__ __forceinline__ void gather_pages(SharedStorage<C>& smem, const FwdParams& params,
                                             const TensorMap& map_q, int warp) {
    if (warp < 2) {
        copy_rows<C, false>(smem, params, map_q, false);
    } else {
        copy_rows<C, true>(smem, params, map_q, warp == 3 && lane_index() == 0);
    }
}

}  // namespace fa::wide
