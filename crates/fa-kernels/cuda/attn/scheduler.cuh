// Numbers the tiles of a launch: by arithmetic where lengths are equal, by the work plan where they are not.
#pragma once
#include "config.cuh"
#include "fwd_params.cuh"
#include "types.cuh"

namespace fa {

// One tile: rows [m_block * tile_m, ...) of `head` (a K/V head under GQA packing) of sequence `batch`.
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
        // Sections of heads whose K and V fit the L2 together; within one, the last (longest) rows of all
        // heads first. The run ends with the last section: it has the heads that are left, and enough tiles
        // to even out.
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

// What a plan counts; its first ints, in this order.
enum class PlanCount { Items, SplitItems, MTiles, NTiles, Slots, Chunk };
constexpr int kPlanHeader = 16;  // ints

// An entry of a plan's lists: a tile of queries or of keys of a sequence, for every head.
struct alignas(16) PlanItem {
    int sequence, block;
    int part;  // items: which part of the keys, and of how many, split | splits << 16; split items: splits
    int slot;  // of the partial result; split items: of the first one
};

// A plan's buffer: header and lists, as attn/plan.cuh writes them and all kernels of a step read them.
struct WorkPlan {
    const PlanParams& params;

    __device__ __forceinline__ int& count(PlanCount which) const {
        return params.buffer[static_cast<int>(which)];
    }
    // Tiles of queries with parts of their keys, longest first; where none are divided, long sequences first.
    __device__ __forceinline__ PlanItem* items() const {
        return reinterpret_cast<PlanItem*>(params.buffer + kPlanHeader);
    }
    // Tiles of queries whose keys are divided.
    __device__ __forceinline__ PlanItem* split_items() const { return items() + params.items; }
    // Tiles of queries in the order of the sequences.
    __device__ __forceinline__ PlanItem* m_tiles() const { return split_items() + params.split_items; }
    // Tiles of keys: those of a sequence one after another, sequences with the most queries first.
    __device__ __forceinline__ PlanItem* n_tiles() const { return m_tiles() + params.m_tiles; }
};

// ---- Tiles whose keys CTAs may share ------------------------------------------------------------

// A tile and its part of the keys: number `split` of `splits`, whose result goes to `slot`.
struct WorkTile : Tile {
    int split, splits, slot;
};

// Tiles of a launch.
template <bool Varied>
__device__ __forceinline__ int work_tiles(const FwdParams& params) {
    return Varied ? WorkPlan{params.plan}.count(PlanCount::Items) * params.plan.heads : params.num_tiles;
}

template <TileOrder Order, bool Varied, bool Split>
__device__ __forceinline__ WorkTile work_tile_at(const FwdParams& params, int index, int heads) {
    if constexpr (Varied) {
        const PlanItem item = WorkPlan{params.plan}.items()[index / heads];
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
