// The work tiles of a CTA of an SM90 forward, and the tiles of keys that each of them visits.
#pragma once
#include "attn/block_list.cuh"
#include "attn/block_range.cuh"
#include "attn/rows.cuh"
#include "attn/scheduler.cuh"
#include "attn/seqlen.cuh"
#include "attn/split.cuh"
#include "attn/visibility.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/atomic.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "sm90/fwd_layout.cuh"
#include "tile/pipeline.cuh"

namespace fa::sm90 {

// A work tile and its sequence's lengths, read ahead by the producer where lengths are on the device.
struct VariedTile {
    WorkTile tile;
    int queries, keys, first_query, first_key;
};
struct NoVariedTile {};

// The work tile of a cluster, which computes no other: its CTAs divide the tile's part of the keys among
// them.
template <auto C>
__device__ __forceinline__ WorkTile cluster_tile(const FwdParams& params, int heads) {
    WorkTile tile = work_tile_at<C.tile_order, false, true>(params, cluster_index(), heads);
    tile.split = tile.split * cluster_cta_count() + cluster_cta_rank();
    tile.splits *= cluster_cta_count();
    return tile;
}

// The source of a CTA's work tiles, for producer and consumers. Static and per-tile schedules are arithmetic.
// Tiles of the dynamic scheduler are drawn by the producer, which passes them to the consumers through shared
// memory one tile ahead; with lengths on the device it passes the plan's entry and the lengths too, whose
// loads are as slow.
template <auto C>
struct TileSource {
    static constexpr bool kDynamic = C.scheduler == Scheduler::Dynamic;
    static constexpr bool kReadsAhead = kDynamic && C.varied;
    // kNone marks the end of the tiles. kAsksAgain: producers of pages have no register for the number of
    // tiles and reread it from the plan with every tile.
    static constexpr int kNone = 0x7fffffff;
    static constexpr bool kAsksAgain = kReadsAhead && C.paged;
    static constexpr bool kOwnPlan = C.own_plan;
    int varied_tiles = kAsksAgain ? kNone : 0;  // number of tiles of a plan; else it is a parameter
    [[no_unique_address]] Either<kReadsAhead, VariedTile, NoVariedTile> own;
    PipelineState<1> state;

    __device__ __forceinline__ explicit TileSource(const FwdParams& params, int first, int heads) {
        if constexpr (C.varied && !kAsksAgain) varied_tiles = work_tiles<true, kOwnPlan>(params);
        read(params, first, heads);
    }

    // The CTA's first tile, or kNone.
    __device__ __forceinline__ int begin(const FwdParams& params, int first) const {
        if constexpr (kAsksAgain) {
            if (first >= work_tiles<true, kOwnPlan>(params)) return kNone;
        }
        return first;
    }

    // Reads tile `index`; returns its number, or kNone.
    __device__ __forceinline__ int read(const FwdParams& params, int index, int heads) {
        if constexpr (kReadsAhead) {
            if constexpr (kAsksAgain) {
                own = {};  // no tile: frees the registers of the previous one
                if (index >= work_tiles<true, kOwnPlan>(params)) return kNone;
            } else {
                if (index >= varied_tiles) return index;
            }
            own.tile = work_tile_at<C.tile_order, true, C.split, kOwnPlan>(params, index, heads);
            const auto seqlen = Seqlen<true>::of(params, own.tile.batch);
            own.queries = seqlen.q();
            own.keys = seqlen.k();
            own.first_query = seqlen.q_offset();
            own.first_key = seqlen.k_offset();
        }
        return index;
    }

    __device__ __forceinline__ WorkTile tile_of(const FwdParams& params, int index, int heads) const {
        if constexpr (kReadsAhead) {
            return own.tile;
        } else if constexpr (parts_in_clusters(C)) {
            return cluster_cta_count() > 1 ? cluster_tile<C>(params, heads)
                                           : work_tile_at<C.tile_order, false, true>(params, index, heads);
        } else {
            return work_tile_at<C.tile_order, C.varied, C.split, kOwnPlan>(params, index, heads);
        }
    }
    __device__ __forceinline__ Seqlen<C.varied> seqlen_of(const FwdParams& params,
                                                          const WorkTile& tile) const {
        if constexpr (kReadsAhead) {
            return {own.queries,          own.keys, own.first_query, own.first_key, params.varlen.total_q,
                    params.shape.seqlen_q};
        } else {
            return Seqlen<C.varied>::of(params, tile.batch);
        }
    }

    // The number of work tiles of the launch.
    __device__ __forceinline__ int count(const FwdParams& params) const {
        return C.varied ? varied_tiles : params.num_tiles;
    }

    // Producer: draws the next tile, some loads before it is needed, to hide the atomic's latency.
    __device__ __forceinline__ int draw(const FwdParams& params, int tile) {
        if constexpr (C.scheduler == Scheduler::PerTile) return count(params);
        if constexpr (C.scheduler == Scheduler::Static) return tile + cta_count();
        return cta_count() + atomic_add(&params.tile_counter[0], 1u);
    }

    // Producer: publishes it to the consumers.
    template <class Storage>
    __device__ __forceinline__ void publish(Storage& smem, int next) {
        if constexpr (kDynamic) {
            mbarrier_wait(smem.ticket.bars.empty[0], state.phase ^ 1);
            int* const ticket = smem.ticket.next;
            ticket[0] = next;
            if constexpr (kReadsAhead) {
                ticket[1] = own.tile.m_block;
                ticket[2] = own.tile.head;
                ticket[3] = own.tile.batch;
                ticket[4] = own.tile.split | own.tile.splits << 16;
                ticket[5] = own.tile.slot;
                ticket[6] = own.queries;
                ticket[7] = own.keys;
                ticket[8] = own.first_query;
                ticket[9] = own.first_key;
            }
            mbarrier_arrive(smem.ticket.bars.full[0]);
            state.advance();
        }
    }

    // All other warps: waits for the next tile and returns its number. Every lane reads the ticket and
    // arrives for itself, since racecheck does not see an order through warp_sync().
    template <class Storage>
    __device__ __forceinline__ int next(Storage& smem, const FwdParams& params, int tile) {
        if constexpr (kDynamic) {
            smem.ticket.bars.wait_full(state);
            const int* const ticket = smem.ticket.next;
            const int next = ticket[0];
            if constexpr (kReadsAhead) {
                const int part = ticket[4];
                own.tile = {{ticket[1], ticket[2], ticket[3]}, part & 0xffff, part >> 16, ticket[5]};
                own.queries = ticket[6];
                own.keys = ticket[7];
                own.first_query = ticket[8];
                own.first_key = ticket[9];
            }
            mbarrier_arrive(smem.ticket.bars.empty[0]);
            state.advance();
            return next;
        }
        return C.scheduler == Scheduler::PerTile ? count(params) : tile + cta_count();
    }
};

// The draw of a whole warp: one lane draws for all.
template <auto C>
__device__ __forceinline__ int draw_tile(TileSource<C>& tiles, const FwdParams& params, int tile) {
    if constexpr (C.scheduler == Scheduler::Dynamic) {
        return shuffle_from(lane_index() == 0 ? tiles.draw(params, tile) : 0, 0);
    } else {
        return tiles.draw(params, tile);
    }
}

// The last CTA to run out of tiles resets the counters for the next launch.
__device__ __forceinline__ void retire_counter(const FwdParams& params) {
    fence_gpu();
    if (atomic_add(&params.tile_counter[1], 1u) == cta_count() - 1) {
        params.tile_counter[0] = 0;
        params.tile_counter[1] = 0;
    }
}

template <auto C>
using VisibleKeys = Visibility<C.mask, C.varied>;

template <auto C>
__device__ __forceinline__ BlockRange tile_blocks(const FwdParams& params, const VisibleKeys<C>& visible,
                                                  const WorkTile& tile, const Blocks& blocks) {
    const QueryEnds queries(visible.seqlen, tile.m_block, tile_queries<C.pack_gqa, C.tile_m>(params));
    BlockRange all = key_blocks<C.tile_n>(visible, queries.first, queries.last);
    if constexpr (kMaskProgram) all = blocks.within(all);
    if constexpr (C.split) return part_of(all, tile.split, tile.splits);
    return all;
}

// A work tile with what a producer needs of it.
template <auto C>
struct LoadTile {
    WorkTile tile;
    Seqlen<C.varied> seqlen;
    [[no_unique_address]] Blocks blocks;
    BlockRange range;  // tiles of keys, by their places among the blocks
    int kv_head;

    __device__ __forceinline__ LoadTile(const FwdParams& params, const TileSource<C>& tiles, int index,
                                        int heads)
        : tile(tiles.tile_of(params, index, heads)), seqlen(tiles.seqlen_of(params, tile)),
          blocks(key_list<mask_tile_words<C>()>(params, tile.batch, tile.head, tile.m_block)),
          range(tile_blocks<C>(params, VisibleKeys<C>{params.shape, seqlen}, tile, blocks)),
          kv_head(C.pack_gqa ? tile.head : tile.head / params.shape.group_size) {}

    // The sequence's row of the page table.
    __device__ __forceinline__ const int* table(const FwdParams& params) const {
        return params.varlen.page_table + i64(tile.batch) * params.varlen.table_stride;
    }
};

// The part of a work tile's range of key tiles that its 64 rows from `first` on visit: it ends at their own
// diagonal. Its beginning is the work tile's, so that tiles left of a window are visited by all rows.
template <auto C>
__device__ __forceinline__ BlockRange warpgroup_blocks(const FwdParams& params, const VisibleKeys<C>& visible,
                                                       const Rows<C.pack_gqa>& rows, const WorkTile& tile,
                                                       const BlockRange& all, int first) {
    const int tile_rows = fa::tile_rows<C.pack_gqa, C.tile_m>(params);
    const int begin = tile.m_block * tile_rows + first;
    const int last = min(begin + 64, rows.end(visible.seqlen, tile.m_block, tile_rows)) - 1;
    BlockRange range = key_blocks<C.tile_n>(visible, rows.query(begin), rows.query(last));
    range.begin = all.begin;
    range.end = begin > last ? all.begin : min(range.end, all.end);
    // With split keys, a part may lie entirely right of these rows' diagonal.
    if constexpr (C.split) range.end = max(range.end, all.begin);
    return range;
}

}  // namespace fa::sm90
