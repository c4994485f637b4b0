// Keys in pages, loaded by the lanes of a warp: a box of TMA for each part of a page.
#pragma once
#include "attn/ragged.cuh"
#include "params.cuh"
#include "ptx/atomic.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"
#include "types.cuh"

namespace fa {

// Number of a key's page among its sequence's.
__device__ __forceinline__ int page_slot(const VarlenParams& varlen, int key) {
    return int(u32(u64(2 * u32(key)) * varlen.page_factor >> 32) >> varlen.page_shift);
}

// Keys of one sequence and head in pages: boxes of `page_part` keys, one of each lane of a warp. (The launch
// divides no tile into more than 32.)
template <int TileN>
struct PagedKeys {
    const VarlenParams& varlen;
    const int* table;  // the sequence's row
    int keys, head;

    // The first row of the lane's part. (The lane is read again at each call: registers are scarce.)
    __device__ __forceinline__ int row() const { return thread_index_volatile() % 32 * varlen.page_part; }

    // The page of the lane's part of a tile; -1 beyond the end, and, counted, where the table names no page
    // of the cache.
    __device__ __forceinline__ int page_of(int n_block) const {
        const int key = n_block * TileN + row();
        if (row() >= TileN || key >= keys) return -1;
        const int page = table[page_slot(varlen, key)];
        if (u32(page) < u32(varlen.pages)) return page;
        if (varlen.page_faults != nullptr) atomic_add(varlen.page_faults, 1u);
        return -1;
    }

    // Loads the lane's part of a tile, which lies in page `page`. A part without a page has no rows: zeros.
    template <class Kv>
    __device__ __forceinline__ void load(u8* dst, const TensorMap& map, const TmaStrides& strides,
                                         Mbarrier& full, int n_block, int page) const {
        if (row() >= TileN) return;
        const int key = n_block * TileN + row();
        const int len = page < 0 ? 0 : min(keys - key, varlen.page_part);
        const int first = key - page_slot(varlen, key) * varlen.page;
        const RaggedRows rows(strides, max(page, 0), head, first, len);
#pragma unroll
        for (int i = 0; i < Kv::kPanels; ++i) {
            load_ragged(dst + i * Kv::kPanelBytes + Kv::row_offset(row()), map, full, i * Kv::kPanel, rows, 0,
                        L2Policy::EvictLast);
        }
    }
};

}  // namespace fa
