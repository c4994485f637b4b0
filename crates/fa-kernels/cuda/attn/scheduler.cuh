// Maps tile numbers to work tiles: by arithmetic for equal lengths, by the work plan for lengths on the
// device.
#pragma once
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/thread.cuh"
#include "types.cuh"

namespace fa {

// A tile of queries: rows from m_block * tile_m on of `head` (a K/V head with PackGqa) of sequence `batch`.
struct Tile {
    int m_block, head, batch;
};

template <TileOrder Order>
__device__ __forceinline__ Tile tile_at(const FwdParams& params, int index, int heads) {
    Tile tile;
    int batch_head;
    if constexpr (Order == TileOrder::Natural) {
        tile.m_block = index % params.m_blocks;
        batch_head = index / params.m_blocks;
    } else {
        // Heads form sections whose K and V fit in L2 together. Within a section the last (longest) rows of
        // all heads come first. The last section has the remaining heads, with enough tiles to balance the
        // load.
        const int section = min(index / (params.heads_per_section * params.m_blocks), params.sections);
        const int first_head = section * params.heads_per_section;
        const int rest = index - first_head * params.m_blocks;
        const int in_section =
            section < params.sections ? params.heads_per_section : heads * params.shape.batch - first_head;
        tile.m_block = params.m_blocks - 1 - rest / in_section;
        batch_head = first_head + rest % in_section;
    }
    tile.batch = batch_head / heads;
    tile.head = batch_head - tile.batch * heads;
    return tile;
}

// ---- The work plan ------------------------------------------------------------------------------

// What a plan counts: the first ints of its buffer, in this order.
enum class PlanCount { Items, SplitItems, MTiles, NTiles, Slots, Chunk };
constexpr int kPlanHeader = 16;  // ints

// An entry of a plan's lists: a tile of queries, or of keys, of one sequence. It stands for all heads.
struct alignas(16) PlanItem {
    int sequence, block;
    int part;  // items: the part of the keys, split | splits << 16; split items: splits
    int slot;  // the slot of the partial result; split items: the first of its slots
};

// A plan's buffer: the header and the lists that attn/plan.cuh writes and all kernels of a step read, or
// buffer `own` of those that CTAs write for themselves.
struct WorkPlan {
    const PlanParams& params;
    u32 own = 0;

    __device__ __forceinline__ int* buffer() const { return params.buffer + i64(own) * params.own_ints; }
    __device__ __forceinline__ int& count(PlanCount which) const { return buffer()[static_cast<int>(which)]; }
    // Tiles of queries, each with a part of its keys, longest first; if no keys are split, long sequences
    // first.
    __device__ __forceinline__ PlanItem* items() const {
        return reinterpret_cast<PlanItem*>(buffer() + kPlanHeader);
    }
    // Tiles of queries whose keys are split.
    __device__ __forceinline__ PlanItem* split_items() const { return items() + params.items; }
    // Tiles of queries, in sequence order.
    __device__ __forceinline__ PlanItem* m_tiles() const { return split_items() + params.split_items; }
    // Tiles of keys, grouped by sequence; sequences with the most queries come first.
    __device__ __forceinline__ PlanItem* n_tiles() const { return m_tiles() + params.m_tiles; }
};

// ---- Work tiles, whose keys may be split among CTAs ---------------------------------------------

// A tile and its part of the keys, number `split` of `splits`. A partial result goes to `slot`.
struct WorkTile : Tile {
    int split, splits, slot;
};

// The plan that a CTA of the forward reads: `Own` where it may have to plan for itself.
template <bool Own>
__device__ __forceinline__ WorkPlan plan_of_cta(const FwdParams& params) {
    return {params.plan, Own ? cta_index() : 0};
}

// The number of work tiles of the launch.
template <bool Varied, bool Own = false>
__device__ __forceinline__ int work_tiles(const FwdParams& params) {
    return Varied ? plan_of_cta<Own>(params).count(PlanCount::Items) * params.plan.heads : params.num_tiles;
}

template <TileOrder Order, bool Varied, bool Split, bool Own = false>
__device__ __forceinline__ WorkTile work_tile_at(const FwdParams& params, int index, int heads) {
    if constexpr (Varied) {
        const PlanItem item = plan_of_cta<Own>(params).items()[index / heads];
        const Tile tile{item.block, index % heads, item.sequence};
        return {tile, Split ? item.part & 0xffff : 0, Split ? item.part >> 16 : 1, item.slot};
    } else if constexpr (Split) {
        const int splits = params.split.splits, split = index % splits;
        const Tile tile = tile_at<Order>(params, index / splits, heads);
        return {tile, split, splits, (tile.batch * params.m_blocks + tile.m_block) * splits + split};
    } else {
        return {tile_at<Order>(params, index, heads), 0, 1, 0};
    }
}

}  // namespace fa
