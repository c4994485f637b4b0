// The backward's work tiles, their positions in the workspace, and the semaphores that order the additions to
// dQ in deterministic kernels.
#pragma once
#include "attn/block_list.cuh"
#include "attn/block_range.cuh"
#include "attn/scheduler.cuh"
#include "attn/seqlen.cuh"
#include "attn/visibility.cuh"
#include "bwd_params.cuh"
#include "config.cuh"
#include "ptx/atomic.cuh"
#include "ptx/sync.cuh"
#include "types.cuh"

namespace fa {

// A work tile: keys [n_block * tile_n, (n_block + 1) * tile_n) of a K/V head, for its query heads
// [first_head, end_head).
struct BwdTile {
    int n_block, kv_head, batch, split, first_head, end_head;
};

// Position of a sequence's tiles in the workspace `[entries, heads, tiles, ...]`. Each padded sequence is an
// entry; packed sequences share one entry, in which each starts on a tile boundary.
struct WorkspacePlace {
    int entry, first;

    template <int Tile>
    __device__ __forceinline__ static WorkspacePlace of(bool packed, int first_row, int batch) {
        if (packed) return {0, first_row / Tile + batch};
        return {batch, 0};
    }
    // The position of the sequence's tiles of queries, and of keys.
    template <int TileM>
    __device__ __forceinline__ static WorkspacePlace of_queries(const BwdParams& params,
                                                                const Seqlen<true>& seqlen, int batch) {
        return of<TileM>(params.varlen.total_q > 0, seqlen.q_offset(), batch);
    }
    template <int TileN>
    __device__ __forceinline__ static WorkspacePlace of_keys(const BwdParams& params,
                                                             const Seqlen<true>& seqlen, int batch) {
        return of<TileN>(params.varlen.total_k > 0, seqlen.k_offset(), batch);
    }
};

// A work tile where lengths are on the device.
struct VariedBwdTile : BwdTile {
    WorkspacePlace queries, keys;
};
template <bool Varied>
using BwdTileOf = Either<Varied, VariedBwdTile, BwdTile>;

// Deterministic kernels draw tiles in an order in which each tile's turn to add to dQ comes up as the tile
// reaches that step (NB-055). Under causal and window masks the last keys come first: a tile then starts
// while the tile before it is at its second step.
template <MaskKind Mask, bool Deterministic>
__device__ __forceinline__ constexpr bool last_keys_first() {
    return Deterministic && Mask != MaskKind::Full;
}

// Under a causal mask that order starts with the shortest tiles. The last section of heads reverses it, so
// that the launch ends with short tiles: the first keys come first, and queries are visited in descending
// order, so that all tiles of a head start at the same queries. With lengths on the device the plan ends with
// the shortest tiles anyway. A single sequence is reversed all the same: its sums are then added in the same
// order, and have the same bits, as with the length on the host.
template <MaskKind Mask, bool Deterministic>
__device__ __forceinline__ constexpr bool can_descend() {
    return Deterministic && Mask == MaskKind::Causal && !kMaskProgram;
}
template <MaskKind Mask, bool Deterministic, bool Varied>
__device__ __forceinline__ bool descends(const BwdParams& params, const BwdTile& tile) {
    if constexpr (!can_descend<Mask, Deterministic>()) return false;
    if (Varied && params.shape.batch > 1) return false;
    const int head = (tile.batch * params.shape.heads_kv + tile.kv_head) * params.head_splits + tile.split;
    return head >= params.sections * params.heads_per_section;
}

// Whether dQ has f32 accumulators: not where a tile has all keys of its sequence.
template <auto C>
constexpr bool keeps_dq_sums() {
    if constexpr (requires { C.whole_keys; }) {
        return !C.whole_keys;
    } else {
        return true;
    }
}

// Whether the first sum of a tile of dQ is stored instead of added (see may_store_dq in config.cuh).
template <auto C>
constexpr bool may_store_dq() {
    if constexpr (requires { C.may_store_dq; }) {
        return C.may_store_dq;
    }
    return false;
}
template <auto C>
__device__ __forceinline__ bool stores_dq(const BwdParams& params) {
    return may_store_dq<C>() && params.stores_dq != 0;
}

// Whether tiles of keys claim tiles of dQ. With lengths on the device, or lists of a mask's program, the
// first tile of keys to arrive stores its sums: it claims the tile of dQ by one semaphore and increments
// another once its sums are stored, for which later arrivals wait (NB-093). A tile claims only when its sums
// are ready, so that others never wait for more than a store in flight, whatever the order of tiles.
// Deterministic kernels know the first tile from their ordering semaphore.
template <auto C>
constexpr bool claims_dq() {
    return may_store_dq<C>() && (C.varied || kMaskProgram) && !C.deterministic;
}

// The same for one head, `head` being counted over splits, K/V heads and sequences. Under a causal mask the
// last section of heads is excluded, which is drawn with the first keys first; so is that of a window, which
// has the heads that are left over.
template <auto C>
__device__ __forceinline__ bool stores_dq(const BwdParams& params, int head) {
    return stores_dq<C>(params) && (claims_dq<C>() || C.mask == MaskKind::Full || params.n_blocks == 1 ||
                                    head < params.sections * params.heads_per_section);
}

// Whether tiles of keys are drawn in the order of their lists' lengths, the longest first (order_lists), so
// that the launch ends with short ones.
template <auto C>
constexpr bool orders_lists() {
    return kMaskProgram && C.tile_order == TileOrder::LongestFirst && !C.deterministic;
}

// Whether no query of tile `m_block` sees a key, so that no tile of keys stores its dQ.
template <int TileM, int TileN, MaskKind Mask, bool Varied>
__device__ __forceinline__ bool sees_nothing(const Visibility<Mask, Varied>& visible, int m_block) {
    const int first = m_block * TileM;
    return key_blocks<TileN>(visible, first, min(first + TileM, visible.seqlen.q()) - 1).empty();
}

// For equal lengths: one past the last tile of queries whose first sums this tile of keys stores. The storing
// tile is the only tile of keys, or the first under a full mask, or else the last visible one.
template <auto C, class Visible>
__device__ __forceinline__ int stored_queries(const BwdParams& params, const Visible& visible,
                                              const BwdTile& tile, const BlockRange& range) {
    if (params.n_blocks == 1) return range.end;
    if (C.mask == MaskKind::Full) return tile.n_block == 0 ? range.end : 0;
    int end = range.begin;
#pragma unroll 1
    for (; end < range.end; ++end) {
        const int first = end * C.tile_m, last = min(first + C.tile_m, visible.seqlen.q()) - 1;
        if (key_blocks<C.tile_n>(visible, first, last).end - 1 != tile.n_block) break;
    }
    return end;
}

// The tile of queries that a tile of keys visits at step `step`; steps run over [range.begin, range.end).
__device__ __forceinline__ int query_block(const BlockRange& range, bool descending, int step) {
    return descending ? range.begin + range.end - 1 - step : step;
}

// Whether tiles of keys visit the queries in a ring, each starting elsewhere: claiming tiles under a full
// mask do so, in order not to reach the same queries at once.
template <auto C>
constexpr bool walks_in_ring() {
    return claims_dq<C>() && C.mask == MaskKind::Full && !kMaskProgram;
}
// The order in which a tile of keys visits its queries: its start in the ring, or else whether it descends.
template <auto C>
__device__ __forceinline__ int query_walk(const BwdParams& params, const BwdTile& tile, int keys,
                                          const BlockRange& range) {
    if constexpr (walks_in_ring<C>()) {
        if (!stores_dq<C>(params)) return 0;
        return tile.n_block * (range.end - range.begin) / ceil_div(keys, C.tile_n);
    } else {
        return descends<C.mask, C.deterministic, C.varied>(params, tile);
    }
}
template <auto C>
__device__ __forceinline__ int query_block(const BlockRange& range, int walk, int step) {
    if constexpr (walks_in_ring<C>()) {
        const int block = step + walk;
        return block >= range.end ? block - (range.end - range.begin) : block;
    } else {
        return query_block(range, walk != 0, step);
    }
}

// Tiles of keys per head; with a work plan, the tiles of all sequences.
template <bool Varied>
__device__ __forceinline__ int bwd_blocks(const BwdParams& params) {
    if constexpr (Varied) {
        return WorkPlan{params.plan}.count(PlanCount::NTiles);
    } else {
        return params.n_blocks;
    }
}

// The tiles of keys of a sequence and head in the order of their lists; with lengths on the device places in
// the plan, of all sequences.
template <bool Varied>
__device__ __forceinline__ const u32* list_order(const BwdParams& params, int batch, int kv_head) {
    const BlockMapParams& map = map_of(params);
    return map_orders(map) + map_slot(map, Varied ? 0 : batch, kv_head) * bwd_blocks<Varied>(params);
}

// Tile `index` of a work plan. Heads form sections as with equal lengths, each over the tiles of all
// sequences.
template <auto C>
__device__ __forceinline__ VariedBwdTile planned_bwd_tile(const BwdParams& params, int index) {
    const int blocks = bwd_blocks<true>(params);
    const int section = min(index / (params.heads_per_section * blocks), params.sections);
    const int first = section * params.heads_per_section, rest = index - first * blocks;
    const int in_section = section < params.sections ? params.heads_per_section : params.plan.heads - first;
    const int head = first + rest % in_section;
    // The plan lists a sequence's tiles in the order in which they are drawn.
    int place = rest / in_section;
    if constexpr (orders_lists<C>()) place = list_order<true>(params, 0, head / params.head_splits)[place];
    const PlanItem item = WorkPlan{params.plan}.n_tiles()[place];
    VariedBwdTile tile;
    tile.n_block = item.block;
    tile.batch = item.sequence;
    tile.split = head % params.head_splits;
    tile.kv_head = head / params.head_splits;
    return tile;
}

// Work tile `index` of the launch.
template <auto C>
__device__ __forceinline__ BwdTileOf<C.varied> bwd_tile_at(const BwdParams& params, int index) {
    constexpr MaskKind Mask = C.mask;
    constexpr bool Deterministic = C.deterministic, Varied = C.varied;
    const ShapeParams& shape = params.shape;
    BwdTileOf<Varied> tile;
    int head;  // counted over splits, K/V heads and sequences
    if constexpr (Varied) {
        tile = planned_bwd_tile<C>(params, index);
        // The plan lists the tiles of the only sequence, the last keys first.
        if (descends<Mask, Deterministic, true>(params, tile)) {
            tile.n_block = bwd_blocks<true>(params) - 1 - tile.n_block;
        }
    } else {
        if constexpr (C.tile_order == TileOrder::Natural && !Deterministic &&
                      (!may_store_dq<C>() || claims_dq<C>())) {
            tile.n_block = index % params.n_blocks;
            head = index / params.n_blocks;
        } else {
            // Heads form sections whose Q, dO and dQ fit in L2 together. Within a section the first keys of
            // all heads come first: under a causal mask they have the most queries. The last section has the
            // remaining heads, with enough tiles to balance the load.
            const int section = min(index / (params.heads_per_section * params.n_blocks), params.sections);
            const int first = section * params.heads_per_section;
            const int rest = index - first * params.n_blocks;
            const int in_section = section < params.sections
                                       ? params.heads_per_section
                                       : shape.heads_kv * params.head_splits * shape.batch - first;
            tile.n_block = rest / in_section;
            head = first + rest % in_section;
            const bool last_first = last_keys_first<Mask, Deterministic>() ||
                                    (Mask != MaskKind::Full && !claims_dq<C>() && stores_dq<C>(params));
            if (last_first && (Mask != MaskKind::Causal || kMaskProgram || section < params.sections))
                tile.n_block = params.n_blocks - 1 - tile.n_block;
        }
        tile.split = head % params.head_splits;
        head /= params.head_splits;
        tile.batch = head / shape.heads_kv;
        tile.kv_head = head - tile.batch * shape.heads_kv;
        if constexpr (orders_lists<C>())
            tile.n_block = list_order<false>(params, tile.batch, tile.kv_head)[tile.n_block];
    }
    const int share = ceil_div(shape.group_size, params.head_splits);
    tile.first_head = tile.kv_head * shape.group_size + tile.split * share;
    tile.end_head = min(tile.first_head + share, (tile.kv_head + 1) * shape.group_size);
    return tile;
}

// Index in the workspace of tile `m_block` of the queries of `head`, over all heads and sequences.
__device__ __forceinline__ i64 dq_tile(const BwdParams& params, const BwdTile& tile, int head, int m_block) {
    return (i64(tile.batch) * params.shape.heads_q + head) * params.m_blocks + m_block;
}

__device__ __forceinline__ i64 dq_tile(const BwdParams& params, const VariedBwdTile& tile, int head,
                                       int m_block) {
    return (i64(tile.queries.entry) * params.shape.heads_q + head) * params.m_blocks +
           (m_block + tile.queries.first);
}

// Index of the tile of keys in the accumulators of dK and dV.
__device__ __forceinline__ i64 dkv_tile(const BwdParams& params, const BwdTile& tile) {
    return (i64(tile.batch) * params.shape.heads_kv + tile.kv_head) * params.n_blocks + tile.n_block;
}
__device__ __forceinline__ i64 dkv_tile(const BwdParams& params, const VariedBwdTile& tile) {
    return (i64(tile.keys.entry) * params.shape.heads_kv + tile.kv_head) * params.n_blocks +
           (tile.n_block + tile.keys.first);
}

// Semaphores per tile of dQ: one for each part that warps add independently (1 or 2), or two for each
// warpgroup's part in kernels that claim.
template <auto C>
constexpr int dq_turns() {
    if constexpr (requires { C.dq_first; }) {
        return C.dq_first > 0 ? 2 : 1;
    } else {
        return claims_dq<C>() ? 2 * C.num_wg : 1;
    }
}

// The semaphore that counts the additions to part `of` of tile `m_block` of dQ, which has `Turns` semaphores.
template <int Turns, class Tile>
__device__ __forceinline__ unsigned* dq_semaphore(const BwdParams& params, const Tile& tile, int head,
                                                  int m_block, int of) {
    return params.dq_semaphores + dq_tile(params, tile, head, m_block) * Turns + of;
}

// Waits until `semaphore` has reached `parts`.
__device__ __forceinline__ void wait_for_parts(const unsigned* semaphore, unsigned parts) {
    while (load_acquire(semaphore) < parts) {
    }
}

// Waits until every tile of keys before this one has made its `parts` additions to part `of` of tile
// `m_block` of dQ; returns whether there is such a tile. Those tiles were drawn earlier, so they are running.
template <int TileM, int TileN, int Turns = 1, MaskKind Mask, bool Varied>
__device__ __forceinline__ bool wait_for_turn(const BwdParams& params,
                                              const Visibility<Mask, Varied>& visible,
                                              const BwdTileOf<Varied>& tile, bool descending, int head,
                                              int m_block, int parts, int of = 0) {
    const int first = m_block * TileM;
    const BlockRange keys = key_blocks<TileN>(visible, first, min(first + TileM, visible.seqlen.q()) - 1);
    const bool last_first = last_keys_first<Mask, true>() && !descending;
    const unsigned before = last_first ? keys.end - 1 - tile.n_block : tile.n_block - keys.begin;
    wait_for_parts(dq_semaphore<Turns>(params, tile, head, m_block, of), before * parts);
    return before > 0;
}

// The same where a list of the mask's program says how many tiles of keys add to the tile of dQ before.
template <int Turns = 1, class Tile>
__device__ __forceinline__ bool wait_for_rank(const BwdParams& params, const Tile& tile, int head,
                                              int m_block, int rank, int parts, int of = 0) {
    wait_for_parts(dq_semaphore<Turns>(params, tile, head, m_block, of), rank * parts);
    return rank > 0;
}

// Ends this tile's turn at tile `m_block` of dQ: the next tile of keys may add.
template <class Tile>
__device__ __forceinline__ void signal_next(const BwdParams& params, const Tile& tile, int head,
                                            int m_block) {
    red_release_increment(dq_semaphore<1>(params, tile, head, m_block, 0));
}

// The semaphore that counts the splits of a K/V head's query heads that have added to a tile of dV (`of` = 0)
// or dK (`of` = 1): splits take turns as well.
template <class Tile>
__device__ __forceinline__ unsigned* dkv_semaphore(const BwdParams& params, const Tile& tile, int of) {
    return params.dkv_semaphores + 2 * dkv_tile(params, tile) + of;
}

}  // namespace fa
