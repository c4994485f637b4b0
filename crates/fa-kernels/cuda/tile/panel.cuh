// Shared-memory tiles of 16-bit elements in the layout that TMA writes and wgmma reads: panels of at most 64
// columns, [columns / panel][rows][panel], swizzled over the width of a panel's row.
#pragma once
#include "types.cuh"

namespace fa {

// The widest panel (and with it the widest swizzle) that divides `columns`.
__host__ __device__ constexpr int widest_panel(int columns) {
    return columns % 64 == 0 ? 64 : columns % 32 == 0 ? 32 : 16;
}

template <int Rows, int Columns, int Panel = widest_panel(Columns)>
struct PanelTile {
    static_assert(Columns % 16 == 0 && Columns % Panel == 0);
    static constexpr int kPanel = Panel;
    static constexpr int kPanels = Columns / kPanel;
    static constexpr int kRowBytes = kPanel * 2;
    static constexpr int kPanelBytes = Rows * kRowBytes;
    static constexpr int kBytes = kPanels * kPanelBytes;

    // Byte offset of column `column` (a multiple of 16) in row 0: the start of a K-major k16 step.
    __host__ __device__ static constexpr int column_offset(int column) {
        return column / kPanel * kPanelBytes + column % kPanel * 2;
    }

    // Byte offset of row `row` (a multiple of 8) in panel 0: the start of an MN-major k16 step, or of a
    // warpgroup's rows.
    __host__ __device__ static constexpr int row_offset(int row) { return row * kRowBytes; }
};

}  // namespace fa
