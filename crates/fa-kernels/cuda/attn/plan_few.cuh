// The plan of a forward's few sequences of one tile each, as a decoding batch has them: by one warp, a
// sequence a lane, which takes half as long as the plan kernel's own way for any number (attn/plan.cuh).
#pragma once
#include "attn/plan.cuh"
#include "attn/plan_cta.cuh"
#include "attn/rows.cuh"
#include "attn/scheduler.cuh"
#include "attn/seqlen.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/grid.cuh"
#include "ptx/redux.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

namespace fa {

// Tiles of keys per part where all sequences have `all`: as Planner::part_length().
__device__ __forceinline__ int few_part_length(const PlanParams& params, int all) {
    const float per_cta = float(all) * float(params.heads) / float(params.slots);
    const float length = per_cta <= 8.f ? per_cta : per_cta / 4.f;
    return max(1, int(fminf(length, 1e9f) + 0.999f));
}

// Lists the tiles with their parts of the keys, longest first, and the tiles whose keys are split. A whole
// warp calls it.
template <PlanRules R>
__device__ __forceinline__ void list_few(const FwdParams& params, const PlanCta<R, 1>& cta) {
    const WorkPlan plan{params.plan};
    const int lane = lane_index(), batch = params.shape.batch;
    const auto seqlen = Seqlen<true>::of(params, min(lane, batch - 1));
    const bool has_tile = lane < batch && seqlen.q() > 0;
    const int length = has_tile ? cta.key_tiles(seqlen, 0) : 0;
    int chunk = 0, splits = has_tile;
    if constexpr (R.split) {
        chunk = few_part_length(params.plan, warp_sum(length));
        const int most = min(params.split.splits, length);
        if (has_tile) splits = max(1, min(int((u32(length) + chunk / 2) / chunk), most));
    }
    // The place of the lane's first entry: after those of longer parts, and of as long ones of lanes before.
    const int part = ceil_div(length, max(splits, 1));
    int place = 0, items = 0;
#pragma unroll 1
    for (int other = 0; other < batch; ++other) {
        const int theirs = shuffle_from(part, other), count = shuffle_from(splits, other);
        if (theirs > part || (theirs == part && other < lane)) place += count;
        items += count;
    }
    const int own_slots = splits > 1 ? splits : 0;
    const int slot = warp_scan(own_slots), number = warp_scan(int(splits > 1));
    if (splits > 1 && number < params.plan.split_items) plan.split_items()[number] = {lane, 0, splits, slot};
    auto write = [&](int sequence, int first, int count, int slot, int split) {
        if (first + split < params.plan.items)
            plan.items()[first + split] = {sequence, 0, split | count << 16, count > 1 ? slot + split : 0};
    };
    // A sequence of many parts is written by all lanes; many sequences of few each by its own.
    if (batch <= 4) {
        for (int other = 0; other < batch; ++other) {
            const int first = shuffle_from(place, other), count = shuffle_from(splits, other);
            const int first_slot = shuffle_from(slot, other);
            for (int split = lane; split < count; split += 32) write(other, first, count, first_slot, split);
        }
    } else {
        for (int split = 0; split < splits; ++split) write(lane, place, splits, slot, split);
    }
    if (lane == 31) {
        plan.count(PlanCount::Items) = min(items, params.plan.items);
        plan.count(PlanCount::SplitItems) = min(number + int(splits > 1), params.plan.split_items);
        plan.count(PlanCount::Slots) = slot + own_slots;
        plan.count(PlanCount::Chunk) = chunk;
    }
}

// The body of a forward unit's entry `fa_plan`. The main kernel, which may start at once, waits for the plan.
template <PlanRules R>
__device__ __forceinline__ void plan_tiles(const FwdParams& params) {
    let_next_launch_start();
    if (params.shape.batch <= 32 && params.shape.seqlen_q <= tile_queries<R.pack_gqa, R.tile_m>(params)) {
        if (warp_index() != 0) return;
        auto& smem = shared_memory<PlanStorage>();
        const PlanCta<R, 1> cta{smem, params.shape, params.varlen, params.plan,
                                tile_queries<R.pack_gqa, R.tile_m>(params)};
        list_few<R>(params, cta);
    } else {
        plan_forward<R>(params);
    }
}

}  // namespace fa
