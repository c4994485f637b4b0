// The plan kernel: lists the work tiles of sequences whose lengths are on the device, longest first. It needs
// no host read; all layers of a step can share its output (WorkPlan, attn/scheduler.cuh).
//
// It runs as one CTA, or for many sequences as a cluster of CTAs that divide them. Tiles are sorted by a
// counting sort on their length, which is the number of tiles of keys (in the backward, of queries) that they
// visit.
#pragma once
#include "attn/plan_cta.cuh"
#include "attn/query_range.cuh"
#include "attn/rows.cuh"
#include "attn/scheduler.cuh"
#include "attn/seqlen.cuh"
#include "attn/visibility.cuh"
#include "bwd_params.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/atomic.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

namespace fa {

template <PlanRules R, int N>
struct Planner : PlanCta<R, N> {
    using Cta = PlanCta<R, N>;
    using Cta::bin_of, Cta::clear_bins, Cta::for_kept, Cta::for_sequences, Cta::for_tiles, Cta::is_shared,
        Cta::is_spread, Cta::key_tiles, Cta::load_of, Cta::m_blocks, Cta::meet, Cta::place_bins,
        Cta::sum_over_ctas;
    using Cta::Cta, Cta::smem, Cta::shape, Cta::varlen, Cta::params, Cta::tile_queries, Cta::cta, Cta::ctas;

    // part_length_of() all tiles. `own`: those that this thread has counted; `most_tiles`: those that there
    // can be; `most`: parts of one.
    __device__ __forceinline__ PartLength part_length(const PlanWork& own, int most_tiles, int most) const {
        PlanLengths& lengths = smem.lengths;
        PlanWork all = own.over_warp();
        const int warp = warp_index(), lane = lane_index();
        if (lane == 0) {
            smem.warp_work[warp] = all.all;
            lengths.longest[warp] = all.longest;
            lengths.tiles[warp] = all.tiles;
        }
        cta_sync();
        if (warp == 0) {
            all = PlanWork{smem.warp_work[lane], lengths.longest[lane], lengths.tiles[lane]}.over_warp();
            if (lane == 0) {
                smem.own_work = all.all;
                lengths.own_longest = all.longest;
                lengths.own_tiles = all.tiles;
            }
        }
        if (is_shared()) {
            meet();
            if (warp == 0) {
                all = {};
                if (lane < ctas) {
                    all = {load_of(smem.own_work, lane), load_of(lengths.own_longest, lane),
                           load_of(lengths.own_tiles, lane)};
                }
                all = all.over_warp();
            }
        }
        // By one warp: the others would take as long again, one after another.
        if (warp == 0) {
            const PartLength length = part_length_of<R>(params, all, most_tiles, most);
            if (lane == 0) smem.lengths.part = length;
        }
        cta_sync();
        return smem.lengths.part;
    }

    // Bins and counts of a lane's entries.
    template <int Count>
    struct Entries {
        int bins[Count], counts[Count];
    };
    template <int Count>
    __device__ __forceinline__ Entries<Count> entries_of(const PlanShare (&shares)[Count]) const {
        Entries<Count> entries;
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            entries.bins[i] = bin_of(shares[i].length, params.shift);
            entries.counts[i] = shares[i].count;
        }
        return entries;
    }

    // Counts entries by their length. Whole warps call it, as for_placed().
    template <int Count>
    __device__ __forceinline__ void count_entries(const PlanShare (&shares)[Count]) const {
        const Entries<Count> entries = entries_of(shares);
        count_in_bins(smem.bins, entries.bins, entries.counts);
    }

    // Calls each(i, place) for every share of the lane, with the place of its first entry.
    template <int Count, class Each>
    __device__ __forceinline__ void for_placed(const PlanShare (&shares)[Count], const Each& each) const {
        const Entries<Count> entries = entries_of(shares);
        int first[Count];
        take_places(smem.places, entries.bins, entries.counts, first);
#pragma unroll
        for (int i = 0; i < Count; ++i) each(i, first[i]);
    }

    // Lists the tiles of queries with their parts of the keys, longest first, and the tiles whose keys are
    // split.
    __device__ __forceinline__ void list_items(int most_splits) const {
        const WorkPlan plan{params};
        PartLength chunk{1, 0};
        // The parts of a tile: their number, and the length of the longest.
        auto cut = [&](const PlanShare& tile) -> PlanShare {
            const int length = tile.length;
            const int splits = chunk.parts_of(length, most_splits);
            return {tile.count > 0 ? splits : 0, ceil_div(length, splits)};
        };
        // Counts the parts, and where other CTAs number their own also the slots.
        auto count = [&](const auto& parts) {
            count_entries(parts);
            for (const PlanShare& own : parts) {
                if (!is_shared() || own.count <= 1) continue;
                atomic_add(&smem.slots, own.count);
                atomic_add(&smem.split_items, 1);
            }
        };
        auto place_all = [&] {
            if (is_shared()) {
                cta_sync();
                if (thread_index() == 0) {
                    smem.own_slots = int(smem.slots);
                    smem.own_split_items = int(smem.split_items);
                }
            }
            const int items = place_bins(longest_keys());
            if (is_shared()) {
                if (warp_index() == 0) {
                    const int slots = sum_over_ctas(smem.own_slots).before;
                    const int split_items = sum_over_ctas(smem.own_split_items).before;
                    if (lane_index() == 0) {
                        smem.slots = slots;
                        smem.split_items = split_items;
                    }
                }
                cta_sync();
            }
            return items;
        };
        auto write = [&](int sequence, int block, int splits, int place) {
            int slot = 0;
            if (splits > 1) {
                slot = atomic_add(&smem.slots, splits);
                const int number = atomic_add(&smem.split_items, 1);
                if (number < params.split_items) plan.split_items()[number] = {sequence, block, splits, slot};
            }
            for (int split = 0; split < splits; ++split) {
                if (place + split < params.items)
                    plan.items()[place + split] = {sequence, block, split | splits << 16, slot + split};
            }
        };
        clear_bins();
        if (thread_index() == 0) smem.slots = smem.split_items = 0;
        int items;
        PlanWork own{};
        if (shape.seqlen_q <= tile_queries) {
            // Each sequence is one tile.
            auto tile_of = [&](const Seqlen<true>& seqlen) -> PlanShare {
                if (seqlen.q() == 0) return {0, 0};
                return {1, key_tiles(seqlen, 0)};
            };
            auto parts_of = [&](const Seqlen<true>& seqlen) { return cut(tile_of(seqlen)); };
            for_sequences(tile_of, [&](const auto&, const auto& tiles) {
                for (const PlanShare& tile : tiles) own.add(tile.length);
            });
            chunk = part_length(own, shape.batch, most_splits);
            for_kept(tile_of, [&](const auto&, auto& tiles) {
                for (PlanShare& tile : tiles) tile = cut(tile);
                count(tiles);
            });
            items = place_all();
            for_kept(parts_of, [&](const auto& sequences, const auto& parts) {
                for_placed(parts, [&](int i, int place) { write(sequences[i], 0, parts[i].count, place); });
            });
        } else {
            auto blocks = [&](const Seqlen<true>& seqlen) { return m_blocks(seqlen); };
            auto tile_of = [&](const Seqlen<true>& seqlen, int block, bool valid) -> PlanShare {
                return {valid, valid ? key_tiles(seqlen, block) : 0};
            };
            for_tiles(blocks, [&](int, const Seqlen<true>& seqlen, int block, int, bool valid) {
                own.add(tile_of(seqlen, block, valid).length);
            });
            chunk = part_length(own, shape.batch * ceil_div(shape.seqlen_q, tile_queries), most_splits);
            for_tiles(blocks, [&](int, const Seqlen<true>& seqlen, int block, int, bool valid) {
                const PlanShare parts[1] = {cut(tile_of(seqlen, block, valid))};
                count(parts);
            });
            items = place_all();
            for_tiles(blocks, [&](int sequence, const Seqlen<true>& seqlen, int block, int, bool valid) {
                const PlanShare parts[1] = {cut(tile_of(seqlen, block, valid))};
                for_placed(parts, [&](int, int place) { write(sequence, block, parts[0].count, place); });
            });
        }
        // The last CTA's counts are of all.
        if (thread_index() == 0 && cta == ctas - 1) {
            plan.count(PlanCount::Items) = min(items, params.items);
            plan.count(PlanCount::SplitItems) = min(int(smem.split_items), params.split_items);
            plan.count(PlanCount::Slots) = int(smem.slots);
            plan.count(PlanCount::Chunk) = chunk.length;
        }
    }

    // Lists the tiles of queries in sequence order.
    __device__ __forceinline__ void list_m_tiles() const {
        const WorkPlan plan{params};
        int before = 0;
        if (is_shared()) {
            // The tiles of the CTAs before this one come first.
            if (thread_index() == 0) smem.own_m_tiles = 0;
            cta_sync();
            int own = 0;
            auto share_of = [&](const Seqlen<true>& seqlen) -> PlanShare { return {m_blocks(seqlen), 0}; };
            for_sequences(share_of, [&](const auto&, const auto& shares) {
                for (const PlanShare& tiles : shares) own += tiles.count;
            });
            own = warp_scan(own) + own;
            if (lane_index() == 31) atomic_add(reinterpret_cast<u32*>(&smem.own_m_tiles), own);
            meet();
            before = sum_over_ctas(smem.own_m_tiles).before;
        }
        const int tiles =
            before + for_tiles([&](const Seqlen<true>& seqlen) { return m_blocks(seqlen); },
                               [&](int sequence, const Seqlen<true>&, int block, int number, bool valid) {
                                   if (valid && before + number < params.m_tiles)
                                       plan.m_tiles()[before + number] = {sequence, block, 1 << 16, 0};
                               });
        if (thread_index() == 0 && cta == ctas - 1)
            plan.count(PlanCount::MTiles) = min(tiles, params.m_tiles);
    }

    // Bounds on the lengths that entries are sorted by.
    __device__ __forceinline__ int longest_keys() const { return ceil_div(shape.seqlen_k, R.tile_n); }
    __device__ __forceinline__ int longest_queries() const { return ceil_div(shape.seqlen_q, tile_queries); }

    // Lists tiles grouped by sequence, in ascending order or, with `LastFirst`, descending; sequences with
    // the greatest length_of(seqlen), at most `longest`, come first. Returns the number of tiles.
    template <bool LastFirst, class BlocksOf, class LengthOf>
    __device__ __forceinline__ int list_by_sequence(PlanItem* list, int room, int longest,
                                                    const BlocksOf& blocks_of,
                                                    const LengthOf& length_of) const {
        auto tiles_of = [&](const Seqlen<true>& seqlen) -> PlanShare {
            const int blocks = blocks_of(seqlen);
            if (blocks == 0) return {0, 0};
            return {blocks, length_of(seqlen)};
        };
        clear_bins();
        cta_sync();
        for_sequences(tiles_of, [&](const auto&, const auto& tiles) { count_entries(tiles); });
        const int tiles = place_bins(longest);
        for_kept(tiles_of, [&](const auto& sequences, const auto& own) {
            auto write = [&](int sequence, int begin, int count, int i) {
                if (begin + i < room) list[begin + i] = {sequence, LastFirst ? count - 1 - i : i, 1 << 16, 0};
            };
            for_placed(own, [&](int i, int place) {
                const int sequence = sequences[i], blocks = own[i].count;
                // A thread writes a short sequence; the warp writes long ones together, one after another.
                if (!warp_any(blocks > 4)) {
                    for (int block = 0; block < blocks; ++block) write(sequence, place, blocks, block);
                    return;
                }
                const int lanes = is_spread() ? ceil_div(shape.batch, 32) : 32;
                for (int lane = 0; lane < lanes; ++lane) {
                    const int theirs = shuffle_from(sequence, lane), begin = shuffle_from(place, lane);
                    const int count = shuffle_from(blocks, lane);
                    for (int block = lane_index(); block < count; block += 32)
                        write(theirs, begin, count, block);
                }
            });
        });
        return min(tiles, room);
    }

    // Lists the tiles of queries where no keys are split. A sequence's tiles are adjacent, since they share
    // its keys, which stay in L2 while they run. Long sequences come first, each with its last tile first.
    __device__ __forceinline__ void list_whole_items() const {
        const WorkPlan plan{params};
        const int items = list_by_sequence<true>(
            plan.items(), params.items, longest_keys(),
            [&](const Seqlen<true>& seqlen) { return m_blocks(seqlen); },
            [&](const Seqlen<true>& seqlen) { return key_tiles(seqlen, m_blocks(seqlen) - 1); });
        if (thread_index() == 0 && cta == 0) {
            plan.count(PlanCount::Items) = items;
            plan.count(PlanCount::SplitItems) = plan.count(PlanCount::Slots) = plan.count(PlanCount::Chunk) =
                0;
        }
    }

    // Lists the tiles of keys; sequences with the most queries come first.
    template <bool LastFirst>
    __device__ __forceinline__ void list_n_tiles() const {
        const WorkPlan plan{params};
        const int tiles = list_by_sequence<LastFirst>(
            plan.n_tiles(), params.n_tiles, longest_queries(),
            [&](const Seqlen<true>& seqlen) { return ceil_div(seqlen.k(), R.tile_n); },
            [&](const Seqlen<true>& seqlen) { return m_blocks(seqlen); });
        if (thread_index() == 0 && cta == 0) plan.count(PlanCount::NTiles) = tiles;
    }
};

template <PlanRules R, int N>
__device__ __forceinline__ void list_forward(PlanStorage& smem, const FwdParams& params) {
    const Planner<R, N> planner{smem, params.shape, params.varlen, params.plan,
                                tile_queries<R.pack_gqa, R.tile_m>(params)};
    if constexpr (R.split) {
        planner.list_items(params.split.splits);
    } else {
        planner.list_whole_items();
    }
    planner.leave();
}

// Deterministic kernels take turns in the order of a sequence's tiles: LastFirst.
template <PlanRules R, bool LastFirst, int N>
__device__ __forceinline__ void list_backward(PlanStorage& smem, const BwdParams& params) {
    const Planner<R, N> planner{smem, params.shape, params.varlen, params.plan, R.tile_m};
    planner.list_m_tiles();
    planner.template list_n_tiles<LastFirst>();
    planner.leave();
}

// The body of a forward unit's entry `fa_plan`. With more sequences than threads these take two at a time: a
// second round would take as long as the first.
template <PlanRules R>
__device__ __forceinline__ void plan_forward(const FwdParams& params) {
    auto& smem = shared_memory<PlanStorage>();
    if (plan_share<R>(params.shape) <= kPlanThreads) {
        list_forward<R, 1>(smem, params);
    } else {
        list_forward<R, 2>(smem, params);
    }
}

// The body of a backward unit's entry `fa_plan`.
template <PlanRules R, bool LastFirst>
__device__ __forceinline__ void plan_backward(const BwdParams& params) {
    auto& smem = shared_memory<PlanStorage>();
    if (plan_share<R>(params.shape) <= kPlanThreads) {
        list_backward<R, LastFirst, 1>(smem, params);
    } else {
        list_backward<R, LastFirst, 2>(smem, params);
    }
}

}  // namespace fa
