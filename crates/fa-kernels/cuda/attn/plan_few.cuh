// The plan of a forward that can have few tiles, as a decoding batch or a chunk of a prompt has: up to 32 by
// one warp, a tile a lane, which takes half as long as the way for any number (attn/plan.cuh); up to 256 by
// eight warps. So short a plan every CTA of a forward makes for itself, unless the call brings one: that
// takes less than a kernel before it.
#pragma once
#include "attn/plan.cuh"
#include "attn/plan_cta.cuh"
#include "attn/rows.cuh"
#include "attn/scheduler.cuh"
#include "attn/seqlen.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/redux.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

namespace fa {

// Tiles of a head that one warp lists, and that a CTA lists for itself.
constexpr int kFewTiles = 32, kOwnTiles = 256;

// Tiles of a head that there can be.
__device__ __forceinline__ int most_tiles(const FwdParams& params) {
    return params.shape.batch * params.m_blocks;
}

// Tile `index` of queries, in sequence order: the tiles of keys that it visits, and whether it exists.
template <PlanRules R>
struct TileOfHead {
    int sequence, block, length;
    bool exists;

    __device__ __forceinline__ TileOfHead(const FwdParams& params, int index)
        : sequence(index / params.m_blocks), block(index % params.m_blocks), length(0) {
        const PlanCta<R, 1> cta{shared_memory<PlanStorage>(), params.shape, params.varlen, params.plan,
                                tile_queries<R.pack_gqa, R.tile_m>(params)};
        const auto seqlen = Seqlen<true>::of(params, min(sequence, params.shape.batch - 1));
        exists = index < most_tiles(params) && block < cta.m_blocks(seqlen);
        if (exists) length = cta.key_tiles(seqlen, block);
    }
};

// Lists the tiles with their parts of the keys, longest first, and the tiles whose keys are split. A whole
// warp calls it.
template <PlanRules R>
__device__ __forceinline__ void list_few(const FwdParams& params, const WorkPlan& plan) {
    const int lane = lane_index(), lanes = most_tiles(params);
    const TileOfHead<R> tile(params, lane);
    const int sequence = tile.sequence, block = tile.block, length = tile.length;
    int chunk = 0, splits = tile.exists;
    bool is_even = false;
    if constexpr (R.split) {
        const PlanWork work{float(warp_sum(length)), warp_max(length), warp_sum(length > 0)};
        const int most = params.split.splits;
        const PartLength parts = part_length_of<R>(params.plan, work, lanes, most);
        chunk = parts.length;
        is_even = work.is_even();
        if (tile.exists) splits = parts.parts_of(length, most);
    }
    // The place of the lane's first entry: after those of longer parts, and of as long ones of lanes before;
    // of tiles of nearly one length after those of lanes before.
    int place = 0, items = 0;
    if (is_even) {
        place = warp_scan(splits);
        items = shuffle_from(place + splits, 31);
    } else {
        const int part = ceil_div(length, max(splits, 1));
#pragma unroll 8
        for (int other = 0; other < lanes; ++other) {
            const int theirs = shuffle_from(part, other), count = shuffle_from(splits, other);
            if (theirs > part || (theirs == part && other < lane)) place += count;
            items += count;
        }
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

// What the warps that list up to kOwnTiles tiles share. Bins are of parts of about one length, longest first.
constexpr int kOwnWarps = kOwnTiles / 32, kOwnBins = 32;
struct OwnPlanStorage {
    PlanWork work[kOwnWarps];
    int sums[kOwnWarps];
    // Tiles of each warp in each bin, later those before them; at last the tiles in order: tile | parts << 8.
    int lists[kOwnTiles];
};
static_assert(kOwnBins * kOwnWarps == kOwnTiles, "a warp's bin for each thread");

// Waits for the warps of list_own(). Barrier 1 has no other use before tiles are computed.
__device__ __forceinline__ void meet_own_warps() { named_barrier_sync(1, kOwnTiles); }

// The sum of the values of threads before this one, and of all. Values are written before the next call's.
struct OwnSums {
    int before, all;

    __device__ __forceinline__ OwnSums(int (&sums)[kOwnWarps], int value) {
        const int lane = lane_index(), warp = warp_index();
        const int in_warp = warp_scan(value);
        if (lane == 31) sums[warp] = in_warp + value;
        meet_own_warps();
        const int own = lane < kOwnWarps ? sums[lane] : 0;
        const int warps = warp_scan(own);
        before = shuffle_from(warps, warp) + in_warp;
        all = shuffle_from(warps + own, 31);
    }
};

// list_few() for up to kOwnTiles tiles, of which each thread of the CTA's first warps has one. Tiles whose
// parts are about as long are listed in sequence order.
template <PlanRules R>
__device__ __forceinline__ void list_own(const FwdParams& params, const WorkPlan& plan,
                                         OwnPlanStorage& smem) {
    static_assert(R.split);
    const int thread = thread_index(), lane = lane_index(), warp = warp_index();
    const TileOfHead<R> tile(params, thread);
    PlanWork own{};
    own.add(tile.length);
    own = own.over_warp();
    if (lane == 0) smem.work[warp] = own;
    smem.lists[thread] = 0;
    meet_own_warps();
    const PlanWork work = (lane < kOwnWarps ? smem.work[lane] : PlanWork{}).over_warp();
    const int most = params.split.splits;
    const PartLength parts = part_length_of<R>(params.plan, work, most_tiles(params), most);
    const int splits = tile.exists ? parts.parts_of(tile.length, most) : 0;

    // The place of the thread's tile: in sequence order, or after those with longer parts.
    int place, tiles;
    if (work.is_even()) {
        const OwnSums sums(smem.sums, splits > 0);
        place = sums.before, tiles = sums.all;
    } else {
        // A lane's rank among those of its warp in the same bin.
        const int longest = max(1, min(work.longest, 2 * parts.length));
        const int part = min(ceil_div(tile.length, max(splits, 1)), longest);
        const int bin = splits > 0 ? kOwnBins - 1 - int(u32(part) * (kOwnBins - 1) / u32(longest)) : -1;
        int rank = 0, alike = 0;
#pragma unroll 4
        for (int other = 0; other < 32; ++other) {
            const bool same = shuffle_from(bin, other) == bin;
            alike += same;
            rank += same && other < lane;
        }
        if (splits > 0 && rank == 0) smem.lists[bin * kOwnWarps + warp] = alike;
        meet_own_warps();
        const OwnSums sums(smem.sums, smem.lists[thread]);
        smem.lists[thread] = sums.before;
        meet_own_warps();
        place = splits > 0 ? smem.lists[bin * kOwnWarps + warp] + rank : 0, tiles = sums.all;
        meet_own_warps();
    }
    if (splits > 0) smem.lists[place] = thread | splits << 8;
    meet_own_warps();

    // Thread by thread in that order. One scan of both: parts are far fewer than 2^20.
    const bool has_tile = thread < tiles;
    const int listed = has_tile ? smem.lists[thread] : 0;
    const int index = listed & 0xff, count = listed >> 8;
    const OwnSums entries(smem.sums, count | (count == 1) << 20);
    const int begin = entries.before & 0xfffff, whole = entries.before >> 20;
    const int slot = begin - whole, number = thread - whole;
    const int sequence = u32(index) / u32(params.m_blocks), block = index - sequence * params.m_blocks;
    if (count > 1 && number < params.plan.split_items)
        plan.split_items()[number] = {sequence, block, count, slot};
    for (int split = 0; split < count; ++split) {
        if (begin + split < params.plan.items)
            plan.items()[begin + split] = {sequence, block, split | count << 16,
                                           count > 1 ? slot + split : 0};
    }
    if (thread == 0) {
        const int items = entries.all & 0xfffff, undivided = entries.all >> 20;
        plan.count(PlanCount::Items) = min(items, params.plan.items);
        plan.count(PlanCount::SplitItems) = min(tiles - undivided, params.plan.split_items);
        plan.count(PlanCount::Slots) = items - undivided;
        plan.count(PlanCount::Chunk) = parts.length;
    }
    // Tiles will be loaded to where the lists were.
    fence_async_shared();
}

// The CTA's own plan, where there is no other. All threads call it; `room` is free until tiles are loaded.
// The caller has a barrier before the plan is read.
template <PlanRules R, class Room>
__device__ __forceinline__ void plan_for_itself(const FwdParams& params, Room& room) {
    static_assert(sizeof(Room) >= sizeof(OwnPlanStorage));
    if (params.plan.own_ints == 0) return;
    const WorkPlan plan = plan_of_cta<true>(params);
    if (most_tiles(params) <= kFewTiles) {
        // The first warp of the consumers, which have nothing to do yet.
        if (warp_index() == 4) list_few<R>(params, plan);
    } else {
        if (warp_index() < kOwnWarps) list_own<R>(params, plan, reinterpret_cast<OwnPlanStorage&>(room));
        cta_sync();
    }
}

// The body of a forward unit's entry `fa_plan`. A launch has at least one sequence and one tile of each.
template <PlanRules R>
__device__ __forceinline__ void plan_tiles(const FwdParams& params) {
    if (params.shape.batch <= kFewTiles && params.m_blocks <= kFewTiles / params.shape.batch) {
        if (warp_index() == 0) list_few<R>(params, WorkPlan{params.plan});
    } else {
        plan_forward<R>(params);
    }
}

}  // namespace fa
