// The plan of a forward that can have few tiles, as a decoding batch or a chunk of a prompt has: by one warp,
// a tile a lane, which takes half as long as the way for any number (attn/plan.cuh). So short a plan every
// CTA of a forward makes for itself, unless the call brings one: that takes less than a kernel before it.
#pragma once
#include "attn/plan.cuh"
#include "attn/plan_cta.cuh"
#include "attn/rows.cuh"
#include "attn/scheduler.cuh"
#include "attn/seqlen.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/redux.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

namespace fa {

// Lists the tiles with their parts of the keys, longest first, and the tiles whose keys are split. A whole
// warp calls it.
template <PlanRules R>
__device__ __forceinline__ void list_few(const FwdParams& params, const WorkPlan& plan) {
    const PlanCta<R, 1> cta{shared_memory<PlanStorage>(), params.shape, params.varlen, params.plan,
                            tile_queries<R.pack_gqa, R.tile_m>(params)};
    const int lane = lane_index(), lanes = params.shape.batch * params.m_blocks;
    const int sequence = lane / params.m_blocks, block = lane % params.m_blocks;
    const auto seqlen = Seqlen<true>::of(params, min(sequence, params.shape.batch - 1));
    const bool has_tile = lane < lanes && block < cta.m_blocks(seqlen);
    const int length = has_tile ? cta.key_tiles(seqlen, block) : 0;
    int chunk = 0, splits = has_tile;
    if constexpr (R.split) {
        chunk = part_length_of<R>(params.plan, float(warp_sum(length)), lanes);
        const int most = min(params.split.splits, length);
        if (has_tile) splits = max(1, min(int((u32(length) + chunk / 2) / chunk), most));
    }
    // The place of the lane's first entry: after those of longer parts, and of as long ones of lanes before.
    const int part = ceil_div(length, max(splits, 1));
    int place = 0, items = 0;
#pragma unroll 8
    for (int other = 0; other < lanes; ++other) {
        const int theirs = shuffle_from(part, other), count = shuffle_from(splits, other);
        if (theirs > part || (theirs == part && other < lane)) place += count;
        items += count;
    }
    // One scan of both: slots are far fewer than 2^24, tiles at most 32.
    const int own_slots = splits > 1 ? splits : 0;
    const int before = warp_scan(own_slots | (splits > 1) << 24);
    const int slot = before & 0xffffff, number = before >> 24;
    if (splits > 1 && number < params.plan.split_items)
        plan.split_items()[number] = {sequence, block, splits, slot};
    // The parts of the tile of lane `of`, from `first` on every `stride`-th. The lanes of a warp call it.
    auto write = [&](int of, int first, int stride) {
        const int own_sequence = shuffle_from(sequence, of), own_block = shuffle_from(block, of);
        const int begin = shuffle_from(place, of), count = shuffle_from(splits, of);
        const int own_slot = shuffle_from(slot, of);
        for (int split = first; split < count; split += stride) {
            if (begin + split < params.plan.items)
                plan.items()[begin + split] = {own_sequence, own_block, split | count << 16,
                                               count > 1 ? own_slot + split : 0};
        }
    };
    // The many parts of a few tiles are written by all lanes, those of more tiles by one lane each.
    if (lanes <= 4) {
        for (int other = 0; other < lanes; ++other) write(other, lane, 32);
    } else {
        write(lane, 0, 1);
    }
    if (lane == 31) {
        plan.count(PlanCount::Items) = min(items, params.plan.items);
        plan.count(PlanCount::SplitItems) = min(number + int(splits > 1), params.plan.split_items);
        plan.count(PlanCount::Slots) = slot + own_slots;
        plan.count(PlanCount::Chunk) = chunk;
    }
}

// The CTA's own plan, where there is no other: by warp `warp`. The caller has a barrier before it is read.
template <PlanRules R>
__device__ __forceinline__ void plan_for_itself(const FwdParams& params, int warp) {
    if constexpr (R.own) {
        if (params.plan.own_ints > 0 && warp_index() == warp) list_few<R>(params, plan_of_cta<true>(params));
    }
}

// The body of a forward unit's entry `fa_plan`. A launch has at least one sequence and one tile of each.
template <PlanRules R>
__device__ __forceinline__ void plan_tiles(const FwdParams& params) {
    if (params.shape.batch <= 32 && params.m_blocks <= 32 / params.shape.batch) {
        if (warp_index() == 0) list_few<R>(params, WorkPlan{params.plan});
    } else {
        plan_forward<R>(params);
    }
}

}  // namespace fa
