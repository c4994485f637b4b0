// The producer of the SM90 forward for keys in pages: each lane of a warp issues a TMA box. A box costs its
// warp about 65 clocks, and a tile of keys can need twenty boxes; so K and V have separate warps, two each
// where a row has several panels (NB-076).
#pragma once
#include "attn/block_range.cuh"
#include "attn/paged_keys.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "sm90/fwd_layout.cuh"
#include "sm90/fwd_producer.cuh"
#include "sm90/fwd_shift.cuh"
#include "sm90/fwd_tiles.cuh"
#include "tile/pipeline.cuh"

namespace fa::sm90 {

// The producer's loop: loads K, or with `Values` Q and V, as warp `member` of each; the warps divide the
// panels. K's first warp draws the work tiles of a dynamic scheduler; the other warps receive them. (V's
// warps load Q, since Q always precedes V, and K then does not wait for the only Q buffer.)
template <Sm90FwdConfig C, bool Values>
__device__ __forceinline__ void produce_pages(SharedStorage<C>& smem, const FwdParams& params,
                                              const TensorMap& map_q, const TensorMap& map, int member) {
    using T = Traits<C>;
    using Kv = Either<Values, typename T::V, typename T::K>;
    PipelineState<C.q_stages> q_state;
    PipelineState<C.kv_stages> state;
    const int heads = C.pack_gqa ? params.shape.heads_kv : params.shape.heads_q;
    TileSource<C> tiles(params, cta_index(), heads);
    auto& bars = kv_bars<Values>(smem);
    const bool first_lane = lane_index() == 0, leads = first_lane && member == 0;
    const bool draws = C.scheduler != Scheduler::Dynamic || (!Values && member == 0);
    // The second warp has no panels where only the other tensor's rows have several. It must not wait for
    // stages: nothing waits for it, so it could miss a whole phase.
    const bool loads = Kv::kPanels >= T::kPageWarps || member < Kv::kPanels;

    int index = tiles.begin(params, cta_index());
    while (index < tiles.count(params)) {
        const LoadTile<C> work(params, tiles, index, heads);
        const int shift = kv_shift<C, Values>(params, work.kv_head);
        const PagedKeys<C.tile_n> keys{params.varlen, work.table(params), work.seqlen.k(), work.kv_head,
                                       shift};

        auto load = [&](int n_block, int entry) {
            if (!loads) return;
            u8* const dst = Values ? smem.v[state.stage] : smem.k[state.stage];
            bars.wait_empty(state);
            // No lane may start the next phase before all lanes have seen the previous one end. Boxes may
            // arrive before their bytes are announced, from the other warp too.
            warp_sync();
            if (leads) bars.announce(state, Kv::kBytes);
            keys.template load<Kv, T::kPageWarps>(
                dst, map, Values ? params.varlen.tma_v : params.varlen.tma_k, bars.full[state.stage], n_block,
                entry, member, !Values && member == 0);
            state.advance();
        };
        int next = 0;
        if (!work.range.empty()) {
            if (Values && leads) load_q<C>(smem, params, map_q, q_state, work);
            int entry = keys.entry_of(work.blocks.at(work.range.end - 1));
#pragma unroll 1
            for (int n_block = work.range.end - 1; n_block > work.range.begin; --n_block) {
                // In flight while the warp waits for a stage.
                const int before = keys.entry_of(work.blocks.at(n_block - 1));
                load(work.blocks.at(n_block), entry);
                entry = before;
            }
            if (draws) next = draw_tile<C>(tiles, params, index);
            load(work.blocks.at(work.range.begin), entry);
        } else {
            if (draws) next = draw_tile<C>(tiles, params, index);
        }
        if (draws) {
            index = tiles.read(params, next, heads);
            if (first_lane) tiles.publish(smem, index);
        } else {
            index = tiles.next(smem, params, index);
        }
    }
    if constexpr (C.scheduler == Scheduler::Dynamic && !Values) {
        if (leads) retire_counter(params);
    }
}

}  // namespace fa::sm90
