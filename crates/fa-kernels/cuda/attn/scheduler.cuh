// Numbers the tiles of a launch.
#pragma once
#include "config.cuh"
#include "params.cuh"

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

}  // namespace fa
