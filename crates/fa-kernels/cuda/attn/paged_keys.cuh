// Loads tiles of keys from pages by TMA: each lane of a warp issues the box of one part of a page.
#pragma once
#include "attn/ragged.cuh"
#include "params.cuh"
#include "ptx/atomic.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/multiply.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"
#include "types.cuh"

namespace fa {

// Index of key `key`'s page in the sequence's row of the page table.
__device__ __forceinline__ int page_slot(const VarlenParams& varlen, int key) {
    return int(high_product(2 * u32(key), varlen.page_factor) >> varlen.page_shift);
}

// The keys of one sequence and head in pages, loaded in boxes of `page_part` keys, one per lane. (The launch
// never divides a tile into more than 32.)
template <int TileN>
struct PagedKeys {
    const VarlenParams& varlen;
    const int* table;  // the sequence's row
    int keys, head;
    int shift;  // columns of a tile before the rows'

    // The first row, within the tile, of the lane's part. (The lane index is reread at each call: registers
    // are scarce.)
    __device__ __forceinline__ int row() const {
        return u32(thread_index_volatile()) % 32 * varlen.page_part;
    }

    // The table entry of the lane's part of tile `n_block`. Only load() checks it, so that until then the
    // read stays in flight. Past the end it is the last key's entry.
    __device__ __forceinline__ int entry_of(int n_block) const {
        const int key = min(n_block * TileN + row(), keys - 1);
        return table[page_slot(varlen, key)];
    }

    // Loads the lane's part of a tile, given its table entry: the panels of warp `member` of `Members`. A
    // part without keys reads as zeros, and so does one whose entry is not a page of the cache, which is
    // counted in page_faults if `counts`.
    template <class Kv, int Members>
    __device__ __forceinline__ void load(u8* dst, const TensorMap& map, const TmaStrides& strides,
                                         Mbarrier& full, int n_block, int entry, int member,
                                         bool counts) const {
        if (row() >= TileN) return;
        const int key = n_block * TileN + row();
        int len = max(min(keys - key, varlen.page_part), 0);
        if (u32(entry) >= u32(varlen.pages)) {
            if (counts && varlen.page_faults != nullptr) atomic_add(varlen.page_faults, 1u);
            entry = len = 0;
        }
        const int first = key - page_slot(varlen, key) * varlen.page;
        const RaggedRows rows(strides, entry, head, first, len);
#pragma unroll
        for (int i = 0; i < Kv::kPanels; ++i) {
            if (i % Members != member) continue;
            load_ragged(dst + i * Kv::kPanelBytes + Kv::row_offset(row()), map, full, i * Kv::kPanel - shift,
                        rows, 0, L2Policy::EvictLast);
        }
    }
};

}  // namespace fa
