// The producer of the SM90 forward for wide heads: one thread issues all TMA loads.
#pragma once
#include "attn/ragged.cuh"
#include "attn/rows.cuh"
#include "attn/store_rows.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"
#include "sm90/wide_layout.cuh"
#include "sm90/wide_tiles.cuh"
#include "tile/pipeline.cuh"
#include "types.cuh"

namespace fa::wide {

// Zeroes the rows of Q that no tile fills with PackGqa. All threads call it, before their first barrier.
template <Sm90WideConfig C>
__device__ __forceinline__ void clear_idle_rows(SharedStorage<C>& smem, const FwdParams& params) {
    using Q = typename Traits<C>::Q;
    const int used = tile_rows<C.pack_gqa, C.tile_m>(params) * Q::kRowBytes;
    if (used == Q::kPanelBytes) return;
#pragma unroll 1
    for (int panel = 0; panel < Q::kPanels; ++panel) {
        for (int at = used + 16 * thread_index(); at < Q::kPanelBytes; at += 16 * cta_threads())
            *reinterpret_cast<Vec16*>(smem.q + panel * Q::kPanelBytes + at) = Vec16{};
    }
    fence_async_shared();
}

// The first column in the tensors of panel `i` of a tile of Q or K. Columns of latents beyond V's are read by
// Q's boxes from the columns behind them; those of K are zero.
template <Sm90WideConfig C>
__device__ __forceinline__ int panel_column(const FwdParams& params, int i) {
    constexpr int kOfValues = C.latent ? Traits<C>::V::kPanels : Traits<C>::K::kPanels;
    return i < kOfValues ? 64 * i : params.shape.head_dim_v + 64 * (i - kOfValues);
}

// Loads a work tile's queries. One thread calls it.
template <Sm90WideConfig C>
__device__ __forceinline__ void load_q(SharedStorage<C>& smem, const FwdParams& params,
                                       const TensorMap& map_q, PipelineState<1>& state,
                                       const QueryTile<C>& work) {
    using Q = typename Traits<C>::Q;
    // With PackGqa only rows of whole groups are loaded: the others stay zero (clear_idle_rows).
    const int bytes =
        C.pack_gqa ? tile_rows<C.pack_gqa, C.tile_m>(params) * (Q::kBytes / C.tile_m) : Q::kBytes;
    smem.q_bars.acquire(state, bytes);
    Mbarrier& full = smem.q_bars.full[0];
    // In queries, not rows, with PackGqa; relative to the sequence's start with lengths on the device.
    const int first = work.tile.m_block * tile_queries<C.pack_gqa, C.tile_m>(params);
    const int head = work.tile.head, batch = work.tile.batch;
    const RaggedRows rows(params.varlen.tma_q, batch, head, work.seqlen.q_offset(), work.seqlen.q());
#pragma unroll
    for (int i = 0; i < Q::kPanels; ++i) {
        u8* const dst = smem.q + i * Q::kPanelBytes;
        const int column = panel_column<C>(params, i);
        if constexpr (C.varied && C.pack_gqa) {
            load_ragged_group(dst, map_q, full, column, rows, first, L2Policy::EvictFirst);
        } else if constexpr (C.varied) {
            load_ragged(dst, map_q, full, column, rows, first, L2Policy::EvictFirst);
        } else if constexpr (C.pack_gqa) {
            tma_load_5d(dst, map_q, full, column, 0, first, head, batch, L2Policy::EvictFirst);
        } else {
            tma_load_4d(dst, map_q, full, column, first, head, batch, L2Policy::EvictFirst);
        }
    }
    state.advance();
}

// Loads a tile of one tensor's rows of keys, from `key` on.
template <Sm90WideConfig C, class Tile>
__device__ __forceinline__ void load_keys(u8* dst, const TensorMap& map, const TmaStrides& strides,
                                          Mbarrier& full, const QueryTile<C>& work, int kv_head, int key) {
#pragma unroll
    for (int i = 0; i < Tile::kPanels; ++i) {
        u8* const panel = dst + i * Tile::kPanelBytes;
        if constexpr (C.varied) {
            const RaggedRows rows(strides, work.tile.batch, kv_head, work.seqlen.k_offset(), work.seqlen.k());
            load_ragged(panel, map, full, 64 * i, rows, key, L2Policy::EvictLast);
        } else {
            tma_load_4d(panel, map, full, 64 * i, key, kv_head, work.tile.batch, L2Policy::EvictLast);
        }
    }
}

template <Sm90WideConfig C>
__device__ __forceinline__ void produce(SharedStorage<C>& smem, const FwdParams& params,
                                        const TensorMap& map_q, const TensorMap& map_k,
                                        const TensorMap& map_v) {
    using T = Traits<C>;
    PipelineState<1> q_state;
    PipelineState<C.kv_stages> state, v_state;
    const VarlenParams& varlen = params.varlen;
    for_each_loaded<C>(params, [&](const QueryTile<C>& work) {
        const int kv_head = work.kv_head(params);
        auto load_k = [&](int i) {
            const int key = work.blocks.at(i) * C.tile_n, stage = state.stage;
            smem.k_bars.acquire(state, T::K::kBytes);
            Mbarrier& full = smem.k_bars.full[stage];
            state.advance();
            if constexpr (C.latent) {
                load_keys<C, typename T::V>(smem.k[stage], map_v, varlen.tma_v, full, work, kv_head, key);
                if constexpr (T::kRopePanels > 0) {
                    load_keys<C, typename T::Rope>(smem.k[stage] + T::V::kBytes, map_k, varlen.tma_k, full,
                                                   work, kv_head, key);
                }
            } else {
                load_keys<C, typename T::K>(smem.k[stage], map_k, varlen.tma_k, full, work, kv_head, key);
            }
        };
        auto load_v = [&](int i) {
            if constexpr (!C.latent) {
                const int stage = v_state.stage;
                smem.v_bars.acquire(v_state, T::V::kBytes);
                v_state.advance();
                load_keys<C, typename T::V>(smem.v.tiles[stage], map_v, varlen.tma_v, smem.v_bars.full[stage],
                                            work, kv_head, work.blocks.at(i) * C.tile_n);
            }
        };
        // In the order in which the buffers become free: a stage before the previous work tile's last S has
        // read Q, and with overlap that of the next K before that of V.
        int i = work.range.end - 1;
        load_k(i);
        load_q<C>(smem, params, map_q, q_state, work);
        if constexpr (!C.overlap) load_v(i);
#pragma unroll 1
        while (--i >= work.range.begin) {
            load_k(i);
            load_v(i + C.overlap);
        }
        if constexpr (C.overlap) load_v(work.range.begin);
    });
}

}  // namespace fa::wide
