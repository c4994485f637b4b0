// The tiles that a mask's program leaves to be visited, as lists that attn/block_map.cuh makes before the
// main kernel starts. A kernel with such a mask counts through a list where others count through a range of
// tiles.
#pragma once
#include "attn/block_range.cuh"
#include "attn/programs.cuh"
#include "program_params.cuh"
#include "types.cuh"

namespace fa {

// An entry: the tile, the number of tiles that add to the same tile of dQ before it, and whether it needs no
// program.
struct BlockEntry {
    static constexpr u32 kBlocks = 1 << 15, kRanks = 1 << 16;
    u32 word;

    __device__ __forceinline__ static BlockEntry of(int block, int rank, bool full) {
        return {u32(block) | u32(rank) << 15 | u32(full) << 31};
    }
    __device__ __forceinline__ int block() const { return word & (kBlocks - 1); }
    __device__ __forceinline__ int rank() const { return word >> 15 & (kRanks - 1); }
    __device__ __forceinline__ bool full() const { return word >> 31 != 0; }
};

// A list in device memory: its length, then its entries.
struct ListedBlocks {
    const u32* list;

    __device__ __forceinline__ static ListedBlocks of(const u32* list) { return {list}; }
    __device__ __forceinline__ int count() const { return list[0]; }
    __device__ __forceinline__ BlockEntry entry(int i) const { return {list[1 + i]}; }
    __device__ __forceinline__ int at(int i) const { return entry(i).block(); }
    __device__ __forceinline__ bool full(int i) const { return entry(i).full(); }
    __device__ __forceinline__ int rank(int i) const { return entry(i).rank(); }

    // The tiles to visit by their places in the list. The band's full tiles stay those of `band`.
    __device__ __forceinline__ BlockRange within(const BlockRange& band) const {
        return {0, count(), band.full_begin, band.full_end};
    }
};

// Without a list: tile i is at place i.
struct CountedBlocks {
    __device__ __forceinline__ static CountedBlocks of(const u32*) { return {}; }
    __device__ __forceinline__ static int at(int i) { return i; }
    __device__ __forceinline__ static bool full(int) { return true; }
    __device__ __forceinline__ static int rank(int) { return 0; }
    __device__ __forceinline__ static BlockRange within(const BlockRange& band) { return band; }
};

using Blocks = Either<kMaskProgram, ListedBlocks, CountedBlocks>;

// The lists of a map: those of a sequence and head, which is the K/V head where tiles have heads of a group.
__device__ __forceinline__ i64 map_slot(const BlockMapParams& map, int batch, int head) {
    return i64(map.batches > 1 ? batch : 0) * map.heads + (map.heads > 1 ? head : 0);
}

// The tiles of keys that tile `m_block` of the queries visits; forward.
template <class Params>
__device__ __forceinline__ Blocks key_list(const Params& params, int batch, int head, int m_block) {
    if constexpr (kMaskProgram) {
        const BlockMapParams& map = map_of(params);
        const i64 row = map_slot(map, batch, head) * map.rows + m_block;
        return Blocks::of(map.lists + row * (map.columns + 1));
    }
    return Blocks::of(nullptr);
}

// The tiles of queries that visit tile `n_block` of the keys; backward.
template <class Params>
__device__ __forceinline__ Blocks query_list(const Params& params, int batch, int kv_head, int n_block) {
    if constexpr (kMaskProgram) {
        const BlockMapParams& map = map_of(params);
        const i64 column = map_slot(map, batch, kv_head) * map.columns + n_block;
        return Blocks::of(map.lists + column * (map.rows + 1));
    }
    return Blocks::of(nullptr);
}

}  // namespace fa
