// The work tiles of a backward, and the semaphores by which deterministic ones take turns at adding to dQ.
#pragma once
#include "attn/block_range.cuh"
#include "config.cuh"
#include "params.cuh"
#include "ptx/atomic.cuh"
#include "ptx/sync.cuh"
#include "types.cuh"

namespace fa {

// One tile: keys [n_block * tile_n, ...) of a K/V head, for its query heads [first_head, end_head).
struct BwdTile {
    int n_block, kv_head, batch, split, first_head, end_head;
};

// Deterministic tiles of a causal mask run from the last keys to the first: the last keys are seen by the
// fewest queries and start where the tile before them is at its second step, so that each tile of dQ is
// reached in order without waiting.
template <MaskKind Mask, bool Deterministic>
__device__ __forceinline__ constexpr bool last_keys_first() {
    return Deterministic && Mask == MaskKind::Causal;
}

template <MaskKind Mask, TileOrder Order, bool Deterministic>
__device__ __forceinline__ BwdTile bwd_tile_at(const BwdParams& params, int index) {
    const ShapeParams& shape = params.shape;
    BwdTile tile;
    int head;  // counted through splits, K/V heads and sequences
    if constexpr (Order == TileOrder::Natural || Deterministic) {
        tile.n_block = index % params.n_blocks;
        if (last_keys_first<Mask, Deterministic>()) tile.n_block = params.n_blocks - 1 - tile.n_block;
        head = index / params.n_blocks;
    } else {
        // Sections of heads whose Q, dO and dQ fit the L2 together; within one, the first keys of all heads
        // first: under a causal mask they are seen by the most queries. The last section has the heads that
        // are left, and enough tiles to even out.
        const int section = min(index / (params.heads_per_section * params.n_blocks), params.sections);
        const int first = section * params.heads_per_section;
        const int rest = index - first * params.n_blocks;
        const int in_section = section < params.sections
                                   ? params.heads_per_section
                                   : shape.heads_kv * params.head_splits * shape.batch - first;
        tile.n_block = rest / in_section;
        head = first + rest % in_section;
    }
    tile.split = head % params.head_splits;
    head /= params.head_splits;
    tile.batch = head / shape.heads_kv;
    tile.kv_head = head - tile.batch * shape.heads_kv;
    const int share = ceil_div(shape.group_size, params.head_splits);
    tile.first_head = tile.kv_head * shape.group_size + tile.split * share;
    tile.end_head = min(tile.first_head + share, (tile.kv_head + 1) * shape.group_size);
    return tile;
}

// Index of tile `m_block` of queries of `head` in the workspace, counted through all heads and sequences.
__device__ __forceinline__ i64 dq_tile(const BwdParams& params, const BwdTile& tile, int head, int m_block) {
    return (i64(tile.batch) * params.shape.heads_q + head) * params.m_blocks + m_block;
}

// Counts what has been added to tile `m_block` of dQ.
__device__ __forceinline__ unsigned* dq_semaphore(const BwdParams& params, const BwdTile& tile, int head,
                                                  int m_block) {
    return params.dq_semaphores + dq_tile(params, tile, head, m_block);
}

// Waits until every tile of keys before this one has added its `parts` parts to tile `m_block` of dQ.
template <int TileM, int TileN, MaskKind Mask, bool Varied>
__device__ __forceinline__ void wait_for_turn(const BwdParams& params,
                                              const Visibility<Mask, Varied>& visible,
                                              const BwdTile& tile, int head, int m_block, int parts) {
    const int first = m_block * TileM;
    const BlockRange keys = key_blocks<TileN>(visible, first, min(first + TileM, visible.seqlen.q()) - 1);
    const unsigned before =
        last_keys_first<Mask, true>() ? keys.end - 1 - tile.n_block : tile.n_block - keys.begin;
    const unsigned* semaphore = dq_semaphore(params, tile, head, m_block);
    while (load_acquire(semaphore) < before * parts) {
    }
}

// Counts this thread's part as added.
__device__ __forceinline__ void signal_next(const BwdParams& params, const BwdTile& tile, int head,
                                            int m_block) {
    fence_gpu();
    red_release_increment(dq_semaphore(params, tile, head, m_block));
}

}  // namespace fa
