// The producer warpgroup of the SM90 forward of e4m3 tensors: one thread issues all TMA loads (of keys in
// pages a warp does, a box each lane), and all of its threads transpose V.
#pragma once
#include "attn/paged_keys.cuh"
#include "attn/ragged.cuh"
#include "attn/rows.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm90/fp8_layout.cuh"
#include "sm90/fwd_tiles.cuh"
#include "tile/pipeline.cuh"

namespace fa::sm90 {

// Zeroes the rows of the Q buffers that no tile fills with PackGqa. All threads call it, before their first
// barrier.
template <Sm90FwdFp8Config C>
__device__ __forceinline__ void clear_idle_rows8(Fp8Storage<C>& smem, const FwdParams& params) {
    using Q = typename Fp8Traits<C>::Q;
    const int used = tile_rows<C.pack_gqa, C.tile_m>(params) * Q::kRowBytes;
#pragma unroll 1
    for (int panel = 0; panel < C.q_stages * Q::kPanels; ++panel) {
        for (int at = used + 16 * thread_index(); at < Q::kPanelBytes; at += 16 * cta_threads())
            *reinterpret_cast<Vec16*>(smem.q[0] + panel * Q::kPanelBytes + at) = Vec16{};
    }
    fence_async_shared();
}

// The loads of a work tile. One thread calls them; for keys in pages a whole warp calls k() and v().
template <Sm90FwdFp8Config C>
struct Fp8Loads {
    using T = Fp8Traits<C>;
    Fp8Storage<C>& smem;
    const FwdParams& params;
    const TensorMap &map_q, &map_k, &map_v;
    PipelineState<C.q_stages> q_state;
    PipelineState<C.kv_stages> k_state;
    PipelineState<C.v_stages> v_state;

    __device__ __forceinline__ void q(const LoadTile<C>& work) {
        using Q = typename T::Q;
        const WorkTile& tile = work.tile;
        // With PackGqa only rows of whole groups are loaded: the others stay zero (clear_idle_rows8).
        const int bytes =
            C.pack_gqa ? tile_rows<C.pack_gqa, C.tile_m>(params) * (Q::kBytes / C.tile_m) : Q::kBytes;
        smem.q_bars.acquire(q_state, bytes);
        Mbarrier& full = smem.q_bars.full[q_state.stage];
        const int first = tile.m_block * tile_queries<C.pack_gqa, C.tile_m>(params);
        const RaggedRows rows(params.varlen.tma_q, tile.batch, tile.head, work.seqlen.q_offset(),
                              work.seqlen.q());
#pragma unroll
        for (int i = 0; i < Q::kPanels; ++i) {
            u8* dst = smem.q[q_state.stage] + i * Q::kPanelBytes;
            const int column = i * Q::kPanel;
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
        q_state.advance();
    }

    __device__ __forceinline__ void k(const LoadTile<C>& work, int n_block) {
        keys<true>(typename T::K{}, smem.k[k_state.stage], map_k, params.varlen.tma_k, smem.k_bars, k_state,
                   work, n_block);
    }
    __device__ __forceinline__ void v(const LoadTile<C>& work, int n_block) {
        keys<false>(typename T::V{}, smem.v[v_state.stage], map_v, params.varlen.tma_v, smem.v_bars, v_state,
                    work, n_block);
    }

    // Rows past the end of a sequence become zeros. Counts: entries of the page table that name no page are
    // counted.
    template <bool Counts, class Tile, class Bars, class State>
    __device__ __forceinline__ void keys(Tile, u8* dst, const TensorMap& map, const TmaStrides& strides,
                                         Bars& bars, State& state, const LoadTile<C>& work, int n_block) {
        Mbarrier& full = bars.full[state.stage];
        if constexpr (C.paged) {
            const PagedKeys<C.tile_n> pages{params.varlen, work.table(params), work.seqlen.k(), work.kv_head,
                                            0};
            const int entry = pages.entry_of(n_block);
            bars.wait_empty(state);
            // No lane may start the next phase before all lanes have seen the previous one end. Boxes may
            // arrive before their bytes are announced.
            warp_sync();
            if (lane_index() == 0) bars.announce(state, Tile::kBytes);
            pages.template load<Tile, 1>(dst, map, strides, full, n_block, entry, 0, Counts);
            state.advance();
            return;
        }
        bars.acquire(state, Tile::kBytes);
        const int first = n_block * C.tile_n;
#pragma unroll
        for (int i = 0; i < Tile::kPanels; ++i) {
            u8* panel = dst + i * Tile::kPanelBytes;
            if constexpr (C.varied) {
                const RaggedRows rows(strides, work.tile.batch, work.kv_head, work.seqlen.k_offset(),
                                      work.seqlen.k());
                load_ragged(panel, map, full, i * Tile::kPanel, rows, first, L2Policy::EvictLast);
            } else {
                tma_load_4d(panel, map, full, i * Tile::kPanel, first, work.kv_head, work.tile.batch,
                            L2Policy::EvictLast);
            }
        }
        state.advance();
    }
};

// Transposes the next tile of V.
template <Sm90FwdFp8Config C>
__device__ __forceinline__ void transpose_v(Fp8Storage<C>& smem, PipelineState<C.v_stages>& from,
                                            PipelineState<C.kv_stages>& to, int warp) {
    smem.v_bars.wait_full(from);
    smem.vt_bars.wait_empty(to);
    Fp8Traits<C>::Transposer::run(smem_address(smem.v[from.stage]), smem_address(smem.vt[to.stage]), warp);
    fence_async_shared();
    // No lane may start the next phase before all lanes have seen the previous one end.
    warp_sync();
    if (lane_index() == 0) {
        mbarrier_arrive(smem.vt_bars.full[to.stage]);
        mbarrier_arrive(smem.v_bars.empty[from.stage]);
    }
    from.advance();
    to.advance();
}

// The warpgroup's loop. The first warp draws the work tiles of a dynamic scheduler; the others receive them.
template <Sm90FwdFp8Config C>
__device__ __forceinline__ void produce8(Fp8Storage<C>& smem, const FwdParams& params, const TensorMap& map_q,
                                         const TensorMap& map_k, const TensorMap& map_v, int warp) {
    Fp8Loads<C> loads{smem, params, map_q, map_k, map_v};
    PipelineState<C.v_stages> v_state;
    PipelineState<C.kv_stages> vt_state;
    const int heads = C.pack_gqa ? params.shape.heads_kv : params.shape.heads_q;
    TileSource<C> tiles(params, cta_index(), heads);
    const bool leads = warp == 0 && lane_index() == 0;
    const bool loads_keys = C.paged ? warp == 0 : leads;
    const bool draws = C.scheduler != Scheduler::Dynamic || warp == 0;

    int index = tiles.begin(params, cta_index());
    while (index < tiles.count(params)) {
        const LoadTile<C> work(params, tiles, index, heads);
        const BlockRange& range = work.range;
        if (loads_keys && !range.empty()) {
            // A second Q buffer becomes free before the next K stage does; a single one does not.
            if (C.q_stages > 1 && leads) loads.q(work);
            loads.k(work, range.end - 1);
            if (C.q_stages == 1 && leads) loads.q(work);
            loads.v(work, range.end - 1);
        }
#pragma unroll 1
        for (int n_block = range.end - 1; n_block >= range.begin; --n_block) {
            const bool more = loads_keys && n_block > range.begin;
            if (more) {
                loads.k(work, n_block - 1);
                if constexpr (C.v_stages > 1) loads.v(work, n_block - 1);
            }
            warp_sync();
            transpose_v<C>(smem, v_state, vt_state, warp);
            if constexpr (C.v_stages == 1) {
                if (more) loads.v(work, n_block - 1);
            }
        }
        if (draws) {
            index = tiles.read(params, draw_tile<C>(tiles, params, index), heads);
            if (leads) tiles.publish(smem, index);
            warp_sync();
        } else {
            index = tiles.next(smem, params, index);
        }
    }
    if constexpr (C.scheduler == Scheduler::Dynamic) {
        if (leads) retire_counter(params);
    }
}

}  // namespace fa::sm90
