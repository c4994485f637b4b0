// The producer of the SM90 forward: one thread issues all TMA loads.
#pragma once
#include "attn/block_range.cuh"
#include "attn/ragged.cuh"
#include "attn/rows.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "sm90/fwd_layout.cuh"
#include "sm90/fwd_shift.cuh"
#include "sm90/fwd_tiles.cuh"
#include "tile/pipeline.cuh"

namespace fa::sm90 {

// Zeroes the rows of the Q buffers that no tile fills with PackGqa. All threads call it, before their first
// barrier.
template <Sm90FwdConfig C>
__device__ __forceinline__ void clear_idle_rows(SharedStorage<C>& smem, const FwdParams& params) {
    using Q = typename Traits<C>::Q;
    const int used = tile_rows<C.pack_gqa, C.tile_m>(params) * Q::kRowBytes;
    if (used == Q::kPanelBytes) return;
#pragma unroll 1
    for (int stage = 0; stage < C.q_stages; ++stage) {
#pragma unroll 1
        for (int panel = 0; panel < Q::kPanels; ++panel) {
            for (int at = used + 16 * thread_index(); at < Q::kPanelBytes; at += 16 * 128 * (C.num_wg + 1))
                *reinterpret_cast<Vec16*>(smem.q[stage] + panel * Q::kPanelBytes + at) = Vec16{};
        }
    }
    fence_async_shared();
}

// Loads a work tile's queries into the next Q buffer, as far to the right as its keys. One thread calls it.
template <Sm90FwdConfig C>
__device__ __forceinline__ void load_q(SharedStorage<C>& smem, const FwdParams& params,
                                       const TensorMap& map_q, PipelineState<C.q_stages>& state,
                                       const LoadTile<C>& work) {
    const WorkTile& tile = work.tile;
    using Q = typename Traits<C>::Q;
    // With PackGqa only rows of whole groups are loaded: the others stay zero (clear_idle_rows).
    const int bytes =
        C.pack_gqa ? tile_rows<C.pack_gqa, C.tile_m>(params) * (Q::kBytes / C.tile_m) : Q::kBytes;
    smem.q_bars.acquire(state, bytes);
    Mbarrier& full = smem.q_bars.full[state.stage];
    // In queries, not rows, with PackGqa; relative to the sequence's start with lengths on the device.
    const int first = tile.m_block * tile_queries<C.pack_gqa, C.tile_m>(params);
    const RaggedRows rows(params.varlen.tma_q, tile.batch, tile.head, work.seqlen.q_offset(),
                          work.seqlen.q());
    const int shift = key_shift<C>(params, work.kv_head);
#pragma unroll
    for (int i = 0; i < Q::kPanels; ++i) {
        u8* dst = smem.q[state.stage] + i * Q::kPanelBytes;
        const int column = i * Q::kPanel - shift;
        if constexpr (C.varied && C.pack_gqa) {
            load_ragged_group(dst, map_q, full, column, rows, first, L2Policy::EvictFirst);
        } else if constexpr (C.varied) {
            load_ragged(dst, map_q, full, column, rows, first, L2Policy::EvictFirst);
        } else if constexpr (C.pack_gqa) {
            tma_load_5d(dst, map_q, full, column, 0, first, tile.head, tile.batch, L2Policy::EvictFirst);
        } else {
            tma_load_4d(dst, map_q, full, column, first, tile.head, tile.batch, L2Policy::EvictFirst);
        }
    }
    state.advance();
}

template <Sm90FwdConfig C>
__device__ __forceinline__ void produce(SharedStorage<C>& smem, const FwdParams& params,
                                        const TensorMap& map_q, const TensorMap& map_k,
                                        const TensorMap& map_v) {
    using T = Traits<C>;
    PipelineState<C.q_stages> q_state;
    PipelineState<C.kv_stages> k_state, v_state;
    const int heads = C.pack_gqa ? params.shape.heads_kv : params.shape.heads_q;
    TileSource<C> tiles(params, cta_index(), heads);
    // Each CTA of a cluster loads a part of every K and V tile and multicasts it to all of them.
    const int share = C.cluster_m > 1 ? cluster_cta_rank() : 0;

    int index = tiles.begin(params, cta_index());
    while (index < tiles.count(params)) {
        const LoadTile<C> work(params, tiles, index, heads);

        const int shift_k = key_shift<C>(params, work.kv_head);
        const int shift_v = value_shift<C>(params, work.kv_head);
        auto q = [&] { load_q<C>(smem, params, map_q, q_state, work); };
        auto load_share = [&](auto tile_type, u8* dst, const TensorMap& map, Mbarrier& full, int n_block,
                              int shift) {
            using Kv = decltype(tile_type);
            constexpr int kRows = C.tile_n / C.cluster_m;
#pragma unroll
            for (int i = 0; i < Kv::kPanels; ++i) {
                u8* panel = dst + i * Kv::kPanelBytes + Kv::row_offset(kRows) * share;
                const int key = n_block * C.tile_n + kRows * share;
                if constexpr (C.cluster_m == 1) {
                    tma_load_4d(panel, map, full, i * Kv::kPanel - shift, key, work.kv_head, work.tile.batch,
                                L2Policy::EvictLast);
                } else {
                    tma_load_4d_multicast(panel, map, full, i * Kv::kPanel - shift, key, work.kv_head,
                                          work.tile.batch, L2Policy::EvictLast, (1 << C.cluster_m) - 1);
                }
            }
        };
        // Loads keys where sequences start at any row.
        auto load_varied = [&](auto tile_type, u8* dst, const TensorMap& map, const TmaStrides& strides,
                               auto& bars, auto& state, int n_block, int shift) {
            using Kv = decltype(tile_type);
            Mbarrier& full = bars.full[state.stage];
            bars.acquire(state, Kv::kBytes);
            const RaggedRows rows(strides, work.tile.batch, work.kv_head, work.seqlen.k_offset(),
                                  work.seqlen.k());
#pragma unroll
            for (int i = 0; i < Kv::kPanels; ++i) {
                load_ragged(dst + i * Kv::kPanelBytes, map, full, i * Kv::kPanel - shift, rows,
                            n_block * C.tile_n, L2Policy::EvictLast);
            }
            state.advance();
        };
        auto load_k = [&](int n_block) {
            if constexpr (C.varied) {
                load_varied(typename T::K{}, smem.k[k_state.stage], map_k, params.varlen.tma_k, smem.k_bars,
                            k_state, n_block, shift_k);
            } else {
                smem.k_bars.acquire(k_state, T::K::kBytes);
                load_share(typename T::K{}, smem.k[k_state.stage], map_k, smem.k_bars.full[k_state.stage],
                           n_block, shift_k);
                k_state.advance();
            }
        };
        auto load_v = [&](int n_block) {
            if constexpr (C.varied) {
                load_varied(typename T::V{}, smem.v[v_state.stage], map_v, params.varlen.tma_v, smem.v_bars,
                            v_state, n_block, shift_v);
            } else {
                smem.v_bars.acquire(v_state, T::V::kBytes);
                load_share(typename T::V{}, smem.v[v_state.stage], map_v, smem.v_bars.full[v_state.stage],
                           n_block, shift_v);
                v_state.advance();
            }
        };
        int next;
        if (!work.range.empty()) {
            // A second Q buffer becomes free before the next K stage does; a single one does not.
            if constexpr (C.q_stages > 1) q();
            load_k(work.blocks.at(work.range.end - 1));
            if constexpr (C.q_stages == 1) q();
#pragma unroll 1
            for (int n_block = work.range.end - 1; n_block > work.range.begin; --n_block) {
                load_k(work.blocks.at(n_block - 1));
                load_v(work.blocks.at(n_block));
            }
            next = tiles.draw(params, index);
            load_v(work.blocks.at(work.range.begin));
        } else {
            next = tiles.draw(params, index);
        }
        tiles.read(params, next, heads);
        tiles.publish(smem, next);
        index = next;
    }
    if constexpr (C.scheduler == Scheduler::Dynamic) retire_counter(params);
}

}  // namespace fa::sm90
