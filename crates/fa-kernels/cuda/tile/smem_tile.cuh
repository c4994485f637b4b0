// Shared-memory tiles of 16-bit elements, written by cp.async and read by ldmatrix: the swizzled panels of
// tile/panel.cuh, or plain row-major rows.
#pragma once
#include "tile/panel.cuh"
#include "types.cuh"

namespace fa {

template <int Rows, int Columns, bool Swizzled>
struct SmemTile {
    static constexpr int kRows = Rows;
    static constexpr int kColumns = Columns;
    static constexpr bool kSwizzled = Swizzled;
    static constexpr int kPanel = Swizzled ? PanelTile<Rows, Columns>::kPanel : Columns;
    static constexpr int kRowBytes = kPanel * 2;
    static constexpr int kPanelBytes = Rows * kRowBytes;
    static constexpr int kBytes = Rows * Columns * 2;
    static constexpr int kChunks = kPanel / 8;  // 16-byte chunks of a panel's row

    // The swizzle of row `row`, with which the number of a chunk in its panel is XORed. It repeats every 8
    // rows, so that a thread whose rows are all congruent modulo 8 computes it once.
    __device__ __forceinline__ static u32 twist(int row) {
        return Swizzled ? row * kRowBytes / 128 % kChunks : 0;
    }

    // Byte offset of the panel that holds column `column` (a multiple of 8), and the number of the column's
    // chunk in it before the swizzle.
    __host__ __device__ static constexpr u32 panel_offset(int column) {
        return column / kPanel * kPanelBytes;
    }
    __host__ __device__ static constexpr u32 chunk(int column) { return column % kPanel / 8; }

    // Byte offset of the 16-byte chunk that starts at `column`, a multiple of 8.
    __device__ __forceinline__ static u32 offset(int row, int column) {
        return panel_offset(column) + row * kRowBytes + ((chunk(column) ^ twist(row)) << 4);
    }
};

}  // namespace fa
