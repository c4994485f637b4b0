// Boxes of rows of which only some exist: TMA on sequences that start anywhere and end anywhere.
//
// A ragged map has three axes for rows, whose extents (2^30, 2^31, 2^30 + 1) and strides (a row, a unit of
// bytes that divides all strides, 2^34 bytes less a row) make addresses wrap around: at x = 2^30 - len + r,
// y = base + len rows, z = 2^30 they come to row r after `base` modulo 2^64. Rows from `len` on are out of
// bounds by x: they read as zeros and memory behind them is never touched.
#pragma once
#include "params.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "types.cuh"

namespace fa {

// Rows of a range: coordinates x and y of its row 0. The next row is the next x.
struct RaggedRows {
    int x, y;

    // `len` rows of `head` that start at row `first` of `entry` (a batch entry, a page).
    __device__ __forceinline__ RaggedRows(const TmaStrides& strides, int entry, int head, int first, int len)
        : x((1 << 30) - len),
          y(u32(entry) * strides.entry + u32(head) * strides.head + u32(first + len) * strides.row) {}
};

constexpr int kRaggedZ = 1 << 30;

// Loads the rows from `row` on, columns from `column` on.
__device__ __forceinline__ void load_ragged(void* dst, const TensorMap& map, Mbarrier& bar, int column,
                                            const RaggedRows& rows, int row, L2Policy policy) {
    tma_load_4d(dst, map, bar, column, rows.x + row, rows.y, kRaggedZ, policy);
}

// The same for packed heads: all heads of a group of each row.
__device__ __forceinline__ void load_ragged_group(void* dst, const TensorMap& map, Mbarrier& bar, int column,
                                                  const RaggedRows& rows, int row, L2Policy policy) {
    tma_load_5d(dst, map, bar, column, 0, rows.x + row, rows.y, kRaggedZ, policy);
}

}  // namespace fa
