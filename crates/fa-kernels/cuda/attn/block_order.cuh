// The kernel that orders a backward's tiles of keys by the lengths of their lists. It runs behind the one
// that makes them, so that a captured graph finds the order of each replay's arrays.
#pragma once
#include "attn/block_list.cuh"
#include "attn/block_map.cuh"
#include "attn/bwd_tile.cuh"
#include "attn/scheduler.cuh"
#include "bwd_params.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

namespace fa {

// A thread for each tile of keys of each map, or with lengths on the device of the plan for each head of a
// map: its place is the number of lists that are longer, and of those before it that are as long, so that
// tiles of equal lists keep the order of the keys.
template <MapRules R>
__device__ __forceinline__ void order_lists(const BwdParams& params) {
    const BlockMapParams& map = map_of(params);
    const int count = bwd_blocks<R.varied>(params), warps = ceil_div(count, 32), lane = lane_index();
    const int warp = (cta_index() * cta_threads() + thread_index()) / 32;
    const int orders = (R.varied ? 1 : map.batches) * map.heads;
    if (warp >= orders * warps) return;
    const int order = warp / warps, own = warp % warps * 32 + lane;
    // -1 beyond the end.
    auto length = [&](int item) {
        if (item >= count) return -1;
        i64 column = i64(order) * map.columns + item;
        if constexpr (R.varied) {
            const PlanItem planned = WorkPlan{params.plan}.n_tiles()[item];
            column = map_slot(map, planned.sequence, order) * map.columns + planned.block;
        }
        return ListedBlocks::of(map.lists + column * list_words<R.tile_words>(map, map.rows)).count();
    };
    const int own_length = length(own);
    int rank = 0;
#pragma unroll 1
    for (int base = 0; base < count; base += 32) {
        const int lengths = length(base + lane);
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int other = shuffle_from(lengths, i);
            rank += other > own_length || (other == own_length && base + i < own);
        }
    }
    if (own < count) map_orders(map)[i64(order) * count + rank] = own;
}

}  // namespace fa
