// A CTA of the plan kernel (attn/plan.cuh): its share of the sequences and of their tiles, and the counting
// sort of entries by length, for one CTA or for a cluster that exchanges counts.
//
// Each thread handles one sequence at a time, or two where its CTA has more than 1024, and caches what it
// computed for them in shared memory.
// Lists of all tiles are made for 1024 sequences at a time: a scan over their tile counts numbers the tiles,
// and a thread finds its tile by binary search.
#pragma once
#include "attn/block_range.cuh"
#include "attn/rows.cuh"
#include "attn/seqlen.cuh"
#include "attn/visibility.cuh"
#include "config.cuh"
#include "params.cuh"
#include "ptx/atomic.cuh"
#include "ptx/cluster.cuh"
#include "ptx/math.cuh"
#include "ptx/redux.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

namespace fa {

constexpr int kPlanThreads = 1024;

// The most CTAs of a launch: the largest cluster that every GPU with clusters takes.
constexpr int kPlanCtas = 8;

// kPlanKept: the number of a CTA's sequences that are cached; the rest is recomputed. kPlanSpread: up to this
// number of sequences they are spread over all warps, so that each warp writes fewer lists.
constexpr int kPlanKept = 9 * kPlanThreads, kPlanSpread = 256;

// The list entries of a sequence or a tile: their number, and the length by which they are sorted.
struct PlanShare {
    int count, length;
};

// Tiles of keys that the tiles of queries visit: of all, of the longest, and the number of tiles that visit
// any.
struct PlanWork {
    float all;
    int longest, tiles;

    __device__ __forceinline__ void add(int length) {
        all += float(length);
        longest = max(longest, length);
        tiles += length > 0;
    }
    // Whether these tiles are of nearly one length.
    __device__ __forceinline__ bool is_even() const {
        return all > 0.f && float(longest) * float(tiles) <= 1.1f * all;
    }
    __device__ __forceinline__ PlanWork over_warp() const {
        float sum = all;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) sum += shuffle_xor(sum, step);
        return {sum, warp_max(longest), warp_sum(tiles)};
    }
};

// How the keys of tiles are divided: into parts of about `length` tiles of keys. `up`: what is added to a
// tile's length before it is divided.
struct PartLength {
    int length, up;

    __device__ __forceinline__ int parts_of(int tile, int most) const {
        return max(1, min(min(int((u32(tile) + up) / length), most), tile));
    }
};

// What warps and the CTA find of the tiles' lengths beside their sum, and the parts that follow.
struct PlanLengths {
    int longest[kPlanThreads / 32], tiles[kPlanThreads / 32], own_longest, own_tiles;
    PartLength part;
};

struct PlanStorage {
    PlanShare kept[kPlanKept];
    int bins[kPlanThreads];  // entries by length, longest first
    union {
        PlanLengths lengths;       // until bins have places
        int places[kPlanThreads];  // the next free index of each bin
    };
    int starts[kPlanThreads];  // tiles before each of the 1024 sequences at hand
    int queries[kPlanThreads], keys[kPlanThreads];
    int warp_sums[kPlanThreads / 32];
    float warp_work[kPlanThreads / 32];
    u32 slots, split_items;  // of the CTA: first counts, then the next free ones
    // What a CTA tells the others of its cluster.
    float own_work;
    int own_slots, own_split_items, own_m_tiles;
};
constexpr int plan_smem_bytes = sizeof(PlanStorage);

// The parts of a kernel's config that determine its tiles and their lengths. `cluster`: whether a launch may
// have more than one CTA, all of one cluster. `whole_parts`: whether CTAs take so long to begin and to store
// their part that few parts are better than a balanced end.
struct PlanRules {
    MaskKind mask;
    int tile_m, tile_n;
    bool pack_gqa, split, cluster, whole_parts;
};

// Rounds of parts up to which tiles of one length are divided: a launch has room for so many parts.
constexpr int kPlanRounds = 6;

// What a part, and what the combination of parts, takes beside its keys, in keys.
constexpr int kPartKeys = 64, kCombineKeys = 200;

// The length for tiles of nearly one length, of which every CTA computes equally many parts: with fewer
// rounds CTAs change less often from part to part, with more the last one is fuller. A lane tries a number of
// rounds, the first one whole tiles. Whole warps call it.
template <PlanRules R>
__device__ __forceinline__ PartLength equal_part_length(const PlanParams& params, const PlanWork& work,
                                                        int most) {
    const u32 lane = lane_index(), tiles = work.tiles * params.heads, slots = params.slots;
    const u32 rounds = lane <= kPlanRounds ? max(int(lane), 1) : 0;
    const u32 parts = min(lane == 0 ? u32(tiles <= slots) : rounds * slots / tiles, u32(most));
    const u32 length = (work.longest + max(int(parts), 1) - 1) / max(int(parts), 1);
    const float keys = float(rounds) * (float(length) * float(R.tile_n) + float(kPartKeys)) +
                       (length < u32(work.longest) ? float(kCombineKeys) : 0.f);
    // The least: positive floats are ordered as their bits. Where no number of rounds is enough, tiles are
    // whole.
    const int order = -int(parts > 0 ? bits_of_float(keys) : 0x7fffffff);
    const int best = warp_max(warp_max(order) == order ? int(length) : 0);
    return {best, best - 1};
}

// Tiles of keys per part, chosen so that all CTAs have about equal work: one part per CTA where that is
// little work, else four, for a balanced end. `most_tiles`: tiles that a head can have; `most`: parts of one.
// Whole warps call it.
template <PlanRules R>
__device__ __forceinline__ PartLength part_length_of(const PlanParams& params, const PlanWork& work,
                                                     int most_tiles, int most) {
    const float per_cta = work.all * float(params.heads) / float(params.slots);
    float length = per_cta <= 8.f ? per_cta : per_cta / 4.f;
    if constexpr (R.whole_parts) {
        // Undivided tiles of one length fill this much of the CTAs' time.
        const float rounds = float(most_tiles) * float(params.heads) / float(params.slots);
        if (rounds <= 1.f || rounds >= 0.7f * float(int(rounds + 0.999f))) length = per_cta;
    } else if (per_cta > 1.f && work.is_even()) {
        return equal_part_length<R>(params, work, most);
    }
    const int whole = max(1, int(fminf(length, 1e9f) + 0.999f));
    return {whole, whole / 2};
}

// Exclusive prefix sum over the lanes of a warp.
__device__ __forceinline__ int warp_scan(int value) {
    const int lane = lane_index();
    int sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = shuffle_from(sum, max(lane - step, 0));
        if (lane >= step) sum += other;
    }
    return sum - value;
}

// Exclusive prefix sum over the threads of the CTA; `total` receives the sum. The caller has a barrier before
// its next scan, which overwrites warp_sums.
__device__ __forceinline__ int cta_scan(PlanStorage& smem, int value, int& total) {
    const int lane = lane_index(), warp = warp_index();
    const int before = warp_scan(value);
    if (lane == 31) smem.warp_sums[warp] = before + value;
    cta_sync();
    const int own = smem.warp_sums[lane];
    const int warps_before = warp_scan(own);
    total = shuffle_from(warps_before + own, 31);
    return shuffle_from(warps_before, warp) + before;
}

// What the entries of a warp have in common, of which each lane has `N`: `counts[i]` of them (possibly none)
// in bin `bins[i]`.
struct SharedBin {
    int own;       // the lane's entries
    int bin;       // the bin of some entry of the warp, or -1 without any
    bool is_only;  // whether all entries are in it, as similar sequences are

    template <int N>
    __device__ __forceinline__ SharedBin(const int (&bins)[N], const int (&counts)[N]) {
        int some = -1;
        own = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (counts[i] > 0) some = bins[i];
            own += counts[i];
        }
        bin = warp_max(some);
        bool differs = false;
#pragma unroll
        for (int i = 0; i < N; ++i) differs |= counts[i] > 0 && bins[i] != bin;
        is_only = !warp_any(differs);
    }
};

// Counts entries in `all`. The whole warp executes it; entries that share their bin share an atomic.
template <int N>
__device__ __forceinline__ void count_in_bins(int* all, const int (&bins)[N], const int (&counts)[N]) {
    u32* const places = reinterpret_cast<u32*>(all);
    const SharedBin shared(bins, counts);
    if (shared.is_only) {
        const int sum = warp_sum(shared.own);
        if (lane_index() == 0 && shared.bin >= 0) atomic_add(&places[shared.bin], sum);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (counts[i] > 0) atomic_add(&places[bins[i]], counts[i]);
        }
    }
}

// The same, where `all` has the next free index of each bin; puts the first index of each entry into `first`.
template <int N>
__device__ __forceinline__ void take_places(int* all, const int (&bins)[N], const int (&counts)[N],
                                            int (&first)[N]) {
    u32* const places = reinterpret_cast<u32*>(all);
    const SharedBin shared(bins, counts);
    if (shared.is_only) {
        const int before = warp_scan(shared.own), sum = before + shared.own;
        int start = 0;
        if (lane_index() == 31 && shared.bin >= 0) start = atomic_add(&places[shared.bin], sum);
        start = shuffle_from(start, 31) + before;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            first[i] = start;
            start += counts[i];
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i)
            first[i] = counts[i] > 0 ? int(atomic_add(&places[bins[i]], counts[i])) : 0;
    }
}

// The CTAs of a launch, and the sequences of each: whole warps of them.
template <PlanRules R>
__device__ __forceinline__ int plan_ctas() {
    return R.cluster ? cta_count() : 1;
}
template <PlanRules R>
__device__ __forceinline__ int plan_share(const ShapeParams& shape) {
    return ceil_div(ceil_div(shape.batch, plan_ctas<R>()), 32) * 32;
}

// A CTA of the plan kernel: its sequences, and how it counts and numbers entries with those of its cluster. A
// thread handles `N` sequences at a time.
template <PlanRules R, int N>
struct PlanCta {
    PlanStorage& smem;
    const ShapeParams& shape;
    const VarlenParams& varlen;
    const PlanParams& params;
    int tile_queries;
    int cta, ctas;   // the CTA's rank in the cluster, and the CTAs of the cluster
    int begin, end;  // the sequences of the CTA

    __device__ __forceinline__ PlanCta(PlanStorage& smem, const ShapeParams& shape,
                                       const VarlenParams& varlen, const PlanParams& params, int tile_queries)
        : smem(smem), shape(shape), varlen(varlen), params(params), tile_queries(tile_queries),
          cta(R.cluster ? cluster_cta_rank() : 0), ctas(plan_ctas<R>()) {
        const int share = plan_share<R>(shape);
        begin = min(cta * share, shape.batch);
        end = min(begin + share, shape.batch);
    }

    __device__ __forceinline__ bool is_shared() const { return R.cluster && ctas > 1; }

    // Waits for the CTAs of the cluster; what they wrote before is then seen by load_of_cluster().
    __device__ __forceinline__ void meet() const {
        if constexpr (R.cluster) cluster_exchange();
    }
    template <class T>
    __device__ __forceinline__ static T load_of(const T& value, int rank) {
        if constexpr (R.cluster) return load_of_cluster(&value, rank);
        return value;
    }

    // The values of the CTAs before this one, and of all, added up. Whole warps call it, after meet().
    struct Sums {
        int before, all;
    };
    __device__ __forceinline__ Sums sum_over_ctas(const int& of_cta) const {
        const int lane = lane_index();
        const int own = lane < ctas ? load_of(of_cta, lane) : 0;
        const int before = warp_scan(own);
        return {shuffle_from(before, cta), shuffle_from(before + own, 31)};
    }

    // The last thing that a CTA does: the others may still be reading its shared memory.
    __device__ __forceinline__ void leave() const {
        if constexpr (R.cluster) {
            if (is_shared()) cluster_leave();
        }
    }

    // Calls each(sequence, seqlen, block, number, valid) for every tile of the CTA's sequences: blocks [0,
    // blocks_of(seqlen)) of each sequence, numbered in this order. Whole warps make the calls; lanes with
    // `valid` false have no tile. Returns the number of tiles. There is a barrier before the first call of
    // `each` and one after the last.
    template <class BlocksOf, class Each>
    __device__ __forceinline__ int for_tiles(const BlocksOf& blocks_of, const Each& each) const {
        const int thread = thread_index();
        int all = 0;
#pragma unroll 1
        for (int first = begin; first < end; first += kPlanThreads) {
            int blocks = 0;
            if (first + thread < end) {
                const auto seqlen = Seqlen<true>::of(shape, varlen, first + thread);
                blocks = blocks_of(seqlen);
                smem.queries[thread] = seqlen.q();
                smem.keys[thread] = seqlen.k();
            }
            int total;
            smem.starts[thread] = cta_scan(smem, blocks, total);
            cta_sync();
            const int sequences = min(kPlanThreads, end - first);
#pragma unroll 1
            for (int base = thread - lane_index(); base < total; base += kPlanThreads) {
                const int number = base + lane_index();
                const bool valid = number < total;
                // Finds the last sequence whose start is at most `number`; sequences without tiles before it
                // have the same start.
                int own = 0;
                for (int step = kPlanThreads / 2; step > 0; step /= 2) {
                    if (own + step < sequences && smem.starts[own + step] <= number) own += step;
                }
                const Seqlen<true> seqlen{smem.queries[own], smem.keys[own], 0, 0, 0, 0};
                each(first + own, seqlen, number - smem.starts[own], all + number, valid);
            }
            all += total;
            cta_sync();
        }
        return all;
    }

    // A lane's sequences of up to `N * kPlanThreads` from some first one on: every `stride`-th one from
    // `of_lane` on, up to `end`. A warp takes 32 consecutive ones, or every 32nd if there are few.
    struct OwnSequences {
        int of_lane, of_lane_0, stride;
    };
    __device__ __forceinline__ bool is_spread() const { return shape.batch <= kPlanSpread; }
    __device__ __forceinline__ OwnSequences own_sequences(int first) const {
        const int warp = warp_index(), lane = lane_index();
        if (N == 1 && is_spread()) return {first + 32 * lane + warp, first + warp, kPlanThreads};
        // With several sequences a lane as few warps as can be have any.
        const int stride =
            N == 1 ? kPlanThreads : min(ceil_div(ceil_div(end - first, N), 32) * 32, kPlanThreads);
        const int of_lane_0 = 32 * warp < stride ? first + 32 * warp : end;
        return {of_lane_0 + lane, of_lane_0, stride};
    }
    __device__ __forceinline__ bool is_kept(int sequence) const {
        return sequence < min(end, begin + kPlanKept);
    }

    // Calls each(sequences, shares) for all sequences of the CTA, `N` of each lane at a time, with shares[i]
    // = share_of(seqlen); their lengths are loaded together. Whole warps make the calls; a lane without a
    // sequence has an empty share. What `each` leaves in `shares` is cached for for_kept(). There is a
    // barrier after the last call.
    template <class ShareOf, class Each>
    __device__ __forceinline__ void for_sequences(const ShareOf& share_of, const Each& each) const {
        for_own([&](const int(&sequences)[N], PlanShare(&shares)[N]) {
            Seqlen<true> lens[N];
#pragma unroll
            for (int i = 0; i < N; ++i) lens[i] = Seqlen<true>::of(shape, varlen, min(sequences[i], end - 1));
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (sequences[i] < end) shares[i] = share_of(lens[i]);
            }
            each(sequences, shares);
        });
    }

    // The same with the cached shares; share_of() recomputes those that are not cached.
    template <class ShareOf, class Each>
    __device__ __forceinline__ void for_kept(const ShareOf& share_of, const Each& each) const {
        for_own([&](const int(&sequences)[N], PlanShare(&shares)[N]) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (is_kept(sequences[i])) {
                    shares[i] = smem.kept[sequences[i] - begin];
                } else if (sequences[i] < end) {
                    shares[i] = share_of(Seqlen<true>::of(shape, varlen, sequences[i]));
                }
            }
            each(sequences, shares);
        });
    }

    // Calls each(sequences, shares) with empty shares, and caches what they are afterwards.
    template <class Each>
    __device__ __forceinline__ void for_own(const Each& each) const {
#pragma unroll 1
        for (int first = begin; first < end; first += N * kPlanThreads) {
            const OwnSequences own = own_sequences(first);
            if (own.of_lane_0 >= end) break;
            int sequences[N];
            PlanShare shares[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                sequences[i] = own.of_lane + i * own.stride;
                shares[i] = {0, 0};
            }
            each(sequences, shares);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (is_kept(sequences[i])) smem.kept[sequences[i] - begin] = shares[i];
            }
        }
        cta_sync();
    }

    __device__ __forceinline__ static int bin_of(int length, int shift) {
        return kPlanThreads - 1 - min(length >> shift, kPlanThreads - 1);
    }

    // Zeroes the bins. A barrier must follow before entries are counted.
    __device__ __forceinline__ void clear_bins() const { smem.bins[thread_index()] = 0; }
    // Turns the bins' counts into the index of the CTA's first entry of each bin; returns the number of
    // entries of all CTAs. `longest`: no entry is longer.
    __device__ __forceinline__ int place_bins(int longest) const {
        const int bin = thread_index();
        int count = smem.bins[bin], before = 0;
        if (is_shared()) {
            meet();
            count = 0;
            if (bin >= bin_of(longest, params.shift)) {
                // All loads in flight at once.
                int theirs[kPlanCtas];
#pragma unroll
                for (int other = 0; other < kPlanCtas; ++other)
                    theirs[other] = load_of(smem.bins[bin], min(other, ctas - 1));
#pragma unroll
                for (int other = 0; other < kPlanCtas; ++other) {
                    if (other < cta) before += theirs[other];
                    if (other < ctas) count += theirs[other];
                }
            }
        }
        int total;
        const int first = cta_scan(smem, count, total);
        smem.places[bin] = first + before;
        cta_sync();
        return total;
    }

    __device__ __forceinline__ int m_blocks(const Seqlen<true>& seqlen) const {
        return ceil_div(seqlen.q(), tile_queries);
    }

    // Number of tiles of keys that tile `block` of queries visits.
    __device__ __forceinline__ int key_tiles(const Seqlen<true>& seqlen, int block) const {
        const QueryEnds queries(seqlen, block, tile_queries);
        const auto range =
            key_blocks<R.tile_n>(Visibility<R.mask, true>{shape, seqlen}, queries.first, queries.last);
        return max(range.end - range.begin, 0);
    }
};

}  // namespace fa
