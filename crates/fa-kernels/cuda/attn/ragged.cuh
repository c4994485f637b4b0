// TMA loads of sequences that start and end at any row: boxes of which only the first rows exist.
//
// A ragged tensor map has three axes for rows. Their extents (2^30, 2^31, 2^30 + 1) and strides (one row; a
// unit in bytes that divides all strides; 2^34 bytes less one row) make addresses wrap around modulo 2^64:
// the coordinates x = 2^30 - len + r, y = base + len rows and z = 2^30 together address row r after `base`.
// Rows from `len` on are out of bounds in x: they read as zeros, and the memory after the sequence is never
// touched.
#pragma once
#include "params.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "types.cuh"

namespace fa {

// A range of rows: the coordinates x and y of its row 0. The next row is at x + 1.
struct RaggedRows {
    int x, y;

    // The `len` rows of `head` that start at row `first` of `entry` (a batch entry, or a page).
    __device__ __forceinline__ RaggedRows(const TmaStrides& strides, int entry, int head, int first, int len)
        : x((1 << 30) - len),
          y(u32(entry) * strides.entry + u32(head) * strides.head + u32(first + len) * strides.row) {}
};

constexpr int kRaggedZ = 1 << 30;

// Loads the box whose first row is `row` and first column `column`.
__device__ __forceinline__ void load_ragged(void* dst, const TensorMap& map, Mbarrier& bar, int column,
                                            const RaggedRows& rows, int row, L2Policy policy) {
    tma_load_4d(dst, map, bar, column, rows.x + row, rows.y, kRaggedZ, policy);
}

// The same with PackGqa: all query heads of the group for each row.
__device__ __forceinline__ void load_ragged_group(void* dst, const TensorMap& map, Mbarrier& bar, int column,
                                                  const RaggedRows& rows, int row, L2Policy policy) {
    tma_load_5d(dst, map, bar, column, 0, rows.x + row, rows.y, kRaggedZ, policy);
}

}  // namespace fa
