// The tiles that a mask's program leaves to be visited, as lists that attn/block_map.cuh makes before the
// main kernel starts. A kernel with such a mask counts through a list where others count through a range of
// tiles.
#pragma once
#include "attn/block_range.cuh"
#include "attn/programs.cuh"
#include "program_params.cuh"
#include "ptx/special.cuh"
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

// Threads that read a mask as bits (attn/mask_bits.cuh), and words of bits of a tile; 0 for kernels that
// evaluate the mask themselves.
constexpr int mask_bit_threads(const Sm90FwdConfig& config) { return 128 * config.num_wg; }
constexpr int mask_bit_threads(const Sm90BwdConfig& config) { return 128 * config.num_wg; }
template <class Config>
constexpr int mask_bit_threads(const Config&) {
    return 0;
}
template <auto C>
constexpr int mask_tile_words() {
    constexpr int kThreads = mask_bit_threads(C);
    if constexpr (kThreads > 0) return ceil_div(C.tile_m * C.tile_n / kThreads, 32) * kThreads;
    return 0;
}

// Words from the beginning of a list of at most `most` tiles to its bits, and to the next list.
__device__ __forceinline__ int list_entries(int most) { return (1 + most + 31) / 32 * 32; }
template <int TileWords>
__device__ __forceinline__ int list_words(const BlockMapParams& map, int most) {
    if constexpr (TileWords > 0) return list_entries(most) + map.kept * TileWords;
    return most + 1;
}

// A list in device memory: its length, then its entries.
struct ListedBlocks {
    const u32* list;

    __device__ __forceinline__ static ListedBlocks of(const u32* list) { return {list}; }
    __device__ __forceinline__ const u32* words() const { return list; }
    __device__ __forceinline__ int count() const { return list[0]; }
    __device__ __forceinline__ BlockEntry entry(int i) const { return {list[1 + i]}; }
    // The same by a load that stays where it is.
    __device__ __forceinline__ BlockEntry entry_here(int i) const {
        return {load_u32_here<0>(reinterpret_cast<const u8*>(list + 1 + i))};
    }
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
    __device__ __forceinline__ static const u32* words() { return nullptr; }
    __device__ __forceinline__ static int count() { return 0; }
    __device__ __forceinline__ static BlockEntry entry(int) { return {}; }
    __device__ __forceinline__ static BlockEntry entry_here(int) { return {}; }
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

// The orders in which tiles of keys are drawn (order_lists), behind the states of a backward's tiles.
__device__ __forceinline__ u32* map_orders(const BlockMapParams& map) {
    return map.tiles + i64(map.batches) * map.heads * map.rows * map.columns;
}

// The tiles of keys that tile `m_block` of the queries visits; forward.
template <int TileWords = 0, class Params>
__device__ __forceinline__ Blocks key_list(const Params& params, int batch, int head, int m_block) {
    if constexpr (kMaskProgram) {
        const BlockMapParams& map = map_of(params);
        const i64 row = map_slot(map, batch, head) * map.rows + m_block;
        return Blocks::of(map.lists + row * list_words<TileWords>(map, map.columns));
    }
    return Blocks::of(nullptr);
}

// The tiles of queries that visit tile `n_block` of the keys; backward.
template <int TileWords = 0, class Params>
__device__ __forceinline__ Blocks query_list(const Params& params, int batch, int kv_head, int n_block) {
    if constexpr (kMaskProgram) {
        const BlockMapParams& map = map_of(params);
        const i64 column = map_slot(map, batch, kv_head) * map.columns + n_block;
        return Blocks::of(map.lists + column * list_words<TileWords>(map, map.rows));
    }
    return Blocks::of(nullptr);
}

}  // namespace fa
