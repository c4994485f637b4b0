// The kernels that find the tiles which a mask's program leaves to be visited, for the main kernel's tiles.
// They run before it in the same stream, so that a captured graph finds the tiles of each replay's arrays.
#pragma once
#include "attn/block_list.cuh"
#include "attn/block_range.cuh"
#include "attn/programs.cuh"
#include "attn/seqlen.cuh"
#include "attn/visibility.cuh"
#include "config.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

namespace fa {

// What the main kernel's config says.
struct MapRules {
    MaskKind mask;
    int tile_n;
    bool varied, backward;
    bool last_keys_first;  // the order in which tiles of keys add to dQ
    int tile_words;        // of bits
    int head_parts = 1;    // of a group's heads, which count as groups
};

// States of tiles until they are listed. Of an open one nothing is known yet.
constexpr u32 kTileOpen = 1u << 29, kTileSeen = 1u << 30, kTileFull = 1u << 31;

// The sum of `x` over this lane and those before it.
__device__ __forceinline__ int warp_sum_before(int x, int lane) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = shuffle_from(x, lane - distance < 0 ? 0 : lane - distance);
        if (lane >= distance) x += other;
    }
    return x;
}

// The state of the tile of queries [first, last] and keys [first_key, last_key] for the query heads
// [head, head + heads), by ranges of values: kTileOpen where they prove neither. By one thread.
template <class Params>
__device__ __forceinline__ u32 proven_state(const Params& params, int group, int queries, int keys, int batch,
                                            int head, int heads, int first, int last, int first_key,
                                            int last_key) {
    bool seen = false, full = true;
#pragma unroll 1
    for (int h = head; h < head + heads; ++h) {
        const Mods mods(programs_of(params), batch, h, h / group, queries, keys, keys - queries);
        const TileState state = mods.tile_state(first, last, first_key, last_key);
        seen = seen || state.visible;
        full = full && state.full;
    }
    return !seen ? 0 : full ? kTileSeen | kTileFull : kTileOpen;
}

// The same by looking at each pair; by a warp.
// Pairs outside of the band do not count.
template <MapRules R, class Visible>
__device__ __forceinline__ u32 tile_state(const ProgramParams& programs, int group, const Visible& visible,
                                          int batch, int head, int heads, int first, int last, int n_block) {
    const int queries = visible.seqlen.q(), keys = visible.seqlen.k();
    const int lane = lane_index();
    bool seen = false, hidden = false;
#pragma unroll 1
    for (int h = head; h < head + heads; ++h) {
        const Mods mods(programs, batch, h, h / group, queries, keys, keys - queries);
        // Of a run of queries, or of keys, that the mask does not tell apart, the first stands for all.
        int next;
#pragma unroll 1
        for (int q = first; q <= last; q = next) {
            next = min((q / Mods::kQueryRun + 1) * Mods::kQueryRun, last + 1);
            const Mods::Row row = mods.row(q);
            const int begin = max(n_block * R.tile_n, visible.keys_begin(q));
            const int end = min((n_block + 1) * R.tile_n, visible.keys_end(next - 1));
            const int first_run = n_block * R.tile_n / Mods::kKeyRun;
            // What the mask reads of several keys is in flight together.
#pragma unroll 4
            for (int run = first_run + lane; run * Mods::kKeyRun < end; run += 32) {
                if ((run + 1) * Mods::kKeyRun <= begin) continue;
                const bool sees = mods.mask(row, mods.column(run * Mods::kKeyRun));
                seen = seen || sees;
                hidden = hidden || !sees;
            }
            warp_sync();
            const bool is_time = Mods::kQueryRun >= 8 || q % 8 == 7;
            if (is_time && warp_any(seen) && warp_any(hidden)) return kTileSeen;
        }
    }
    if (!warp_any(seen)) return 0;
    return warp_any(hidden) ? kTileSeen : kTileSeen | kTileFull;
}

// A CTA for each tile of queries of each map, of `tile_queries` queries. A forward's tiles are listed; a
// backward's states are left with their ranks for list_queries().
template <MapRules R, class Params>
__device__ __forceinline__ void map_blocks(const Params& params, int tile_queries) {
    const ProgramParams& programs = programs_of(params);
    const BlockMapParams& map = map_of(params);
    const int row = cta_index() % map.rows, slot = cta_index() / map.rows;
    const int batch = slot / map.heads, head = slot % map.heads * map.head_group;
    const int group = params.shape.group_size * R.head_parts;
    const auto seqlen = Seqlen<R.varied>::of(params, batch);
    const Visibility<R.mask, R.varied> visible{params.shape, seqlen};
    const int first = row * tile_queries, last = min(first + tile_queries, seqlen.q()) - 1;
    u32* const states = R.backward
                            ? map.tiles + i64(cta_index()) * map.columns
                            : map.lists + i64(cta_index()) * list_words<R.tile_words>(map, map.columns) + 1;
    const int warp = thread_index() / 32, warps = cta_threads() / 32, lane = lane_index();
    BlockRange band{0, 0, 0, 0};
    if (first <= last) band = key_blocks<R.tile_n>(visible, first, last);
    // Ranges decide about most tiles, each in the time of a few pairs. An array with an element for each pair
    // would be read twice.
#pragma unroll 1
    for (int n_block = thread_index(); n_block < map.columns; n_block += cta_threads()) {
        u32 state = 0;
        if (n_block >= band.begin && n_block < band.end) {
            state = kTileOpen;
            if constexpr (!Mods::kMaskReadsPairs) {
                const int end = min((n_block + 1) * R.tile_n, seqlen.k());
                state = proven_state(params, group, seqlen.q(), seqlen.k(), batch, head, map.head_group,
                                     first, last, n_block * R.tile_n, end - 1);
            }
        }
        states[n_block] = state;
    }
    cta_sync();
#pragma unroll 1
    for (int n_block = warp; n_block < map.columns; n_block += warps) {
        const bool open = states[n_block] == kTileOpen;
        // All lanes have read the state before it is overwritten.
        warp_sync();
        if (!open) continue;
        const u32 state =
            tile_state<R>(programs, group, visible, batch, head, map.head_group, first, last, n_block);
        if (lane == 0) states[n_block] = state;
    }
    cta_sync();
    if (warp > 0) return;
    int total = 0;
#pragma unroll 1
    for (int base = 0; base < map.columns; base += 32) {
        const int place = base + lane, n_block = R.last_keys_first ? map.columns - 1 - place : place;
        const u32 state = place < map.columns ? states[n_block] : 0;
        const int sees = (state & kTileSeen) != 0;
        const int until = warp_sum_before(sees, lane), rank = total + until - sees;
        // All lanes have read their states before entries overwrite them.
        warp_sync();
        if constexpr (R.backward) {
            if (sees) states[n_block] = state | rank;
        } else {
            if (sees) states[rank] = BlockEntry::of(n_block, 0, (state & kTileFull) != 0).word;
        }
        total += shuffle_from(until, 31);
        warp_sync();
    }
    if (!R.backward && lane == 0) states[-1] = total;
}

// A warp for each tile of keys of each map: lists the tiles of queries that visit it.
template <MapRules R, class Params>
__device__ __forceinline__ void list_queries(const Params& params) {
    const BlockMapParams& map = map_of(params);
    const int item = (cta_index() * cta_threads() + thread_index()) / 32, lane = lane_index();
    if (item >= map.batches * map.heads * map.columns) return;
    const int n_block = item % map.columns, slot = item / map.columns;
    const u32* const states = map.tiles + i64(slot) * map.rows * map.columns + n_block;
    u32* const list = map.lists + i64(item) * list_words<R.tile_words>(map, map.rows);
    int total = 0;
#pragma unroll 1
    for (int base = 0; base < map.rows; base += 32) {
        const int row = base + lane;
        const u32 state = row < map.rows ? states[i64(row) * map.columns] : 0;
        const int sees = (state & kTileSeen) != 0;
        const int until = warp_sum_before(sees, lane);
        if (sees) {
            list[total + until] =
                BlockEntry::of(row, state & (BlockEntry::kRanks - 1), (state & kTileFull) != 0).word;
        }
        total += shuffle_from(until, 31);
    }
    if (lane == 0) list[0] = total;
}

}  // namespace fa
