// Keys in pages, loaded by the lanes of a warp: a box of TMA for each part of a page.
#pragma once
#include "attn/ragged.cuh"
#include "params.cuh"
#include "ptx/atomic.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "types.cuh"

namespace fa {

// Keys of one sequence and head in pages: boxes of `page_part` keys, which the lanes of a warp issue.
template <int TileN>
struct PagedKeys {
    const VarlenParams& varlen;
    const int* table;  // the sequence's row
    int keys, head, lane;

    // The page of a key; -1 beyond the end, and, counted, where the table names no page of the cache.
    __device__ __forceinline__ int page_of(int key) const {
        if (key >= keys) return -1;
        const int page = table[key / varlen.page];
        if (u32(page) < u32(varlen.pages)) return page;
        if (varlen.page_faults != nullptr) atomic_add(varlen.page_faults, 1u);
        return -1;
    }

    // Loads this lane's parts of a tile, the first of which lies in page `page` (read ahead). Parts without a
    // page have no rows: zeros.
    template <class Kv>
    __device__ __forceinline__ void load(u8* dst, const TensorMap& map, const TmaStrides& strides,
                                         Mbarrier& full, int n_block, int page) const {
#pragma unroll 1
        for (int row = lane * varlen.page_part; row < TileN; row += 32 * varlen.page_part) {
            const int key = n_block * TileN + row;
            if (row >= 32 * varlen.page_part) page = page_of(key);
            const int len = page < 0 ? 0 : min(keys - key, varlen.page_part);
            const RaggedRows rows(strides, max(page, 0), head, key % varlen.page, len);
#pragma unroll
            for (int i = 0; i < Kv::kPanels; ++i) {
                load_ragged(dst + i * Kv::kPanelBytes + Kv::row_offset(row), map, full, i * Kv::kPanel, rows,
                            0, L2Policy::EvictLast);
            }
        }
    }
};

}  // namespace fa
