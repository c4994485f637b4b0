// Shared-memory tiles of 8-bit elements: laid out as tiles of 16-bit elements (tile/panel.cuh) are, with a
// pair of columns in the place of each.
#pragma once
#include "tile/panel.cuh"
#include "types.cuh"

namespace fa {

template <int Rows, int Columns>
struct BytePanelTile {
    static_assert(Columns % 32 == 0, "the k32 steps of wgmma");
    using Pairs = PanelTile<Rows, Columns / 2>;
    static constexpr int kPanel = 2 * Pairs::kPanel;  // columns
    static constexpr int kPanels = Pairs::kPanels;
    static constexpr int kRowBytes = Pairs::kRowBytes;
    static constexpr int kPanelBytes = Pairs::kPanelBytes;
    static constexpr int kBytes = Pairs::kBytes;

    // Byte offset of column `column` (a multiple of 32) in row 0: the start of a K-major k32 step.
    __host__ __device__ static constexpr int column_offset(int column) {
        return Pairs::column_offset(column / 2);
    }

    // Byte offset of row `row` (a multiple of 8) in panel 0.
    __host__ __device__ static constexpr int row_offset(int row) { return Pairs::row_offset(row); }
};

}  // namespace fa
