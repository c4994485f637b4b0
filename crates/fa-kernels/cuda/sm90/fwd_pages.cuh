// The producer of the SM90 forward for keys in pages: the lanes of a warp issue a box of TMA each.
#pragma once
#include "attn/block_range.cuh"
#include "attn/paged_keys.cuh"
#include "attn/rows.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "sm90/fwd_layout.cuh"
#include "sm90/fwd_producer.cuh"
#include "sm90/fwd_tiles.cuh"
#include "tile/pipeline.cuh"

namespace fa::sm90 {

// By one warp, whose first lane does all but the loads of K and V.
template <Sm90FwdConfig C>
__device__ __forceinline__ void produce_pages(SharedStorage<C>& smem, const FwdParams& params,
                                              const TensorMap& map_q, const TensorMap& map_k,
                                              const TensorMap& map_v) {
    using T = Traits<C>;
    PipelineState<C.q_stages> q_state;
    // Of V's next stage; K's is the same before a tile of queries, and one ahead while its keys are loaded.
    using KvState = PipelineState<C.kv_stages>;
    KvState state;
    const int heads = C.pack_gqa ? params.shape.heads_kv : params.shape.heads_q;
    TileSource<C> tiles(params, cta_index(), heads);
    const bool leads = lane_index() == 0;

    int index = tiles.begin(params, cta_index());
    while (index < tiles.count(params)) {
        const WorkTile tile = tiles.tile_of(params, index, heads);
        const auto seqlen = tiles.seqlen_of(params, tile);
        const BlockRange range =
            tile_blocks<C>(VisibleKeys<C>{params.shape, seqlen}, Rows<C.pack_gqa>(params.shape), tile);
        const PagedKeys<C.tile_n> keys{
            params.varlen, params.varlen.page_table + i64(tile.batch) * params.varlen.table_stride,
            seqlen.k(), C.pack_gqa ? tile.head : tile.head / params.shape.group_size};

        auto q = [&] {
            if (leads) load_q<C>(smem, params, map_q, q_state, tile, seqlen);
        };
        auto load = [&](auto tile_type, u8* dst, const TensorMap& map, const TmaStrides& strides, auto& bars,
                        const KvState& own, int n_block, int page) {
            using Kv = decltype(tile_type);
            bars.wait_empty(own);
            // The phase ends only after all lanes have seen the one before end. Boxes may come before they
            // are announced.
            warp_sync();
            if (leads) bars.announce(own, Kv::kBytes);
            keys.template load<Kv>(dst, map, strides, bars.full[own.stage], n_block, page);
        };
        auto load_k = [&](const KvState& own, int n_block, int page) {
            load(typename T::K{}, smem.k[own.stage], map_k, params.varlen.tma_k, smem.k_bars, own, n_block,
                 page);
        };
        auto load_v = [&](int n_block, int page) {
            load(typename T::V{}, smem.v[state.stage], map_v, params.varlen.tma_v, smem.v_bars, state,
                 n_block, page);
            state.advance();
        };
        int next;
        if (!range.empty()) {
            // K and V of a tile lie in the same pages, whose numbers are on their way while a stage is waited
            // for.
            int page = keys.page_of(range.end - 1);
            if constexpr (C.q_stages > 1) q();
            load_k(state, range.end - 1, page);
            if constexpr (C.q_stages == 1) q();
#pragma unroll 1
            for (int n_block = range.end - 1; n_block > range.begin; --n_block) {
                const int before = keys.page_of(n_block - 1);
                KvState ahead = state;
                ahead.advance();
                load_k(ahead, n_block - 1, before);
                load_v(n_block, page);
                page = before;
            }
            next = draw_tile<C>(tiles, params, index);
            load_v(range.begin, page);
        } else {
            next = draw_tile<C>(tiles, params, index);
        }
        index = tiles.read(params, next, heads);
        if (leads) tiles.publish(smem, index);
    }
    if constexpr (C.scheduler == Scheduler::Dynamic) {
        if (leads) retire_counter(params);
    }
}

}  // namespace fa::sm90
