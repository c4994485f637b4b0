// Numbers the tiles of a backward launch, and the order in which deterministic ones add to dQ.
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

// Deterministic tiles of a causal mask run from the last keys to the first: the last ones see the fewest queries and begin where
// the ones before them have their second step, so that each tile of dQ is reached in turn without waiting.
template <MaskKind Mask, bool Deterministic>
__device__ __forceinline__ constexpr bool last_keys_first() {
    return Deterministic && Mask == MaskKind::Causal;
}

template <MaskKind Mask, TileOrder Order, bool Deterministic>
__device__ __forceinline__ BwdTile bwd_tile_at(const BwdParams& params, int index) {
    BwdTile tile;
    int head;  // counted through splits, K/V heads and sequences
    if constexpr (Order == TileOrder::Natural || Deterministic) {
        tile.n_block = index % params.n_blocks;
        if (last_keys_first<Mask, Deterministic>()) tile.n_block = params.n_blocks - 1 - tile.n_block;
        head = index / params.n_blocks;
    } else {
        // Sections of heads whose Q, dO and dQ fit the L2 together; within one, the first keys of all heads first: under a causal
        // mask they are seen by the most queries. The last section has the heads that are left, and enough tiles to even out.
        const int section = min(index / (params.heads_per_section * params.n_blocks), params.sections);
        const int first = section * params.heads_per_section;
        const int rest = index - first * params.n_blocks;
        const int in_section =
            section < params.sections ? params.heads_per_section : params.shape.heads_kv * params.head_splits * params.shape.batch - first;
        tile.n_block = rest / in_section;
        head = first + rest % in_section;
    }
    tile.split = head % params.head_splits;
    head /= params.head_splits;
    tile.batch = head / params.shape.heads_kv;
    tile.kv_head = head - tile.batch * params.shape.heads_kv;
    const int share = ceil_div(params.shape.group_size, params.head_splits);
    tile.first_head = tile.kv_head * params.shape.group_size + tile.split * share;
    tile.end_head = min(tile.first_head + share, (tile.kv_head + 1) * params.shape.group_size);
    return tile;
}

__device__ __forceinline__ unsigned* dq_turn(const BwdParams& params, const BwdTile& tile, int head, int m_block) {
    return params.dq_semaphores + (i64(tile.batch) * params.shape.heads_q + head) * params.m_blocks + m_block;
}

// Waits until every tile of keys that comes before this one has added its `parts` parts to tile `m_block` of dQ.
template <MaskKind Mask, int TileM, int TileN>
__device__ __forceinline__ void wait_for_turn(const BwdParams& params, const BwdTile& tile, int head, int m_block, int parts) {
    const int first = m_block * TileM;
    const BlockRange keys = block_range<Mask, TileN>(params, first, min(first + TileM, params.shape.seqlen_q) - 1);
    const unsigned before = last_keys_first<Mask, true>() ? keys.end - 1 - tile.n_block : tile.n_block - keys.begin;
    const unsigned* turn = dq_turn(params, tile, head, m_block);
    unsigned seen;
    do {
        seen = load_acquire(turn);
    } while (seen < before * parts);
}

// Announces that this thread's part has been added.
__device__ __forceinline__ void pass_turn(const BwdParams& params, const BwdTile& tile, int head, int m_block) {
    fence_gpu();
    red_release_increment(dq_turn(params, tile, head, m_block));
}

}  // namespace fa
