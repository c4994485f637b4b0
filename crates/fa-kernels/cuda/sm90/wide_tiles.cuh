// The work tiles of a CTA of the SM90 forward for wide heads, and the tiles of keys that each of them visits.
// Every role computes them by itself.
#pragma once
#include "attn/block_list.cuh"
#include "attn/block_range.cuh"
#include "attn/rows.cuh"
#include "attn/scheduler.cuh"
#include "attn/seqlen.cuh"
#include "attn/visibility.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/thread.cuh"

namespace fa {

// Of the leader alone, which has the scores.
constexpr int mask_bit_threads(const Sm90WideConfig&) { return 128; }

}  // namespace fa

namespace fa::wide {

// Heads of the launch: K/V heads, or parts of their groups, with PackGqa; else query heads.
template <Sm90WideConfig C>
__device__ __forceinline__ int tile_heads(const FwdParams& params) {
    return C.pack_gqa ? params.shape.heads_kv : params.shape.heads_q;
}

template <Sm90WideConfig C>
struct QueryTile {
    WorkTile tile;
    Seqlen<C.varied> seqlen;
    [[no_unique_address]] Blocks blocks;
    BlockRange range;  // tiles of keys, by their places among the blocks, visited from the last to the first

    __device__ __forceinline__ QueryTile(const FwdParams& params, int index)
        : tile(work_tile_at<C.tile_order, C.varied, C.split, C.own_plan>(params, index,
                                                                         tile_heads<C>(params))),
          seqlen(Seqlen<C.varied>::of(params, tile.batch)),
          blocks(key_list<mask_tile_words<C>()>(params, tile.batch, tile.head, tile.m_block)) {
        const QueryEnds queries(seqlen, tile.m_block, tile_queries<C.pack_gqa, C.tile_m>(params));
        range = key_blocks<C.tile_n>(visible(params), queries.first, queries.last);
        if constexpr (kMaskProgram) range = blocks.within(range);
        if constexpr (C.split) range = part_of(range, tile.split, tile.splits);
    }

    __device__ __forceinline__ Visibility<C.mask, C.varied> visible(const FwdParams& params) const {
        return {params.shape, seqlen};
    }
    __device__ __forceinline__ int kv_head(const FwdParams& params) const {
        return tile.head / (C.pack_gqa ? C.head_parts : params.shape.group_size);
    }
    // The sequence's row of the page table.
    __device__ __forceinline__ const int* table(const FwdParams& params) const {
        return params.varlen.page_table + i64(tile.batch) * params.varlen.table_stride;
    }
    // The result is a part's, which the combine kernel adds to the others.
    __device__ __forceinline__ bool is_part() const { return C.split && tile.splits > 1; }
};

// Calls `each` for each of the CTA's work tiles, in order, with those that see keys and those that do not.
template <Sm90WideConfig C, class Each>
__device__ __forceinline__ void for_each_tile(const FwdParams& params, const Each& each) {
    const int count = work_tiles<C.varied, C.own_plan>(params);
#pragma unroll 1
    for (int index = cta_index(); index < count; index += cta_count()) {
        each(QueryTile<C>(params, index));
        if constexpr (C.scheduler == Scheduler::PerTile) break;
    }
}

// The same for those that see keys: all that is loaded.
template <Sm90WideConfig C, class Each>
__device__ __forceinline__ void for_each_loaded(const FwdParams& params, const Each& each) {
    for_each_tile<C>(params, [&](const QueryTile<C>& work) {
        if (!work.range.empty()) each(work);
    });
}

}  // namespace fa::wide
