// Stores a warp's accumulator fragments, 16 rows rounded to 16 bits, in a panel tile, as they are or
// transposed.
#pragma once
#include "ptx/stmatrix.cuh"
#include "tile/panel.cuh"
#include "tile/stmatrix_tile.cuh"
#include "types.cuh"

namespace fa {

// Stores 16 x (4 * Words) elements, packed in accumulator order, at (row, column) of the tile; with
// Transposed at (column, row) of the stored tile.
template <class Tile, bool Transposed, int Words>
__device__ __forceinline__ void store_fragment(u32 base, const u32 (&packed)[Words], int row, int column,
                                               int lane) {
    auto address = [&](int r, int c) {
        const int at_row = Transposed ? c : r, at_column = Transposed ? r : c;
        return base + at_column / Tile::kPanel * Tile::kPanelBytes +
               swizzled<Tile::kRowBytes>(at_row * Tile::kRowBytes + at_column % Tile::kPanel * 2);
    };
#pragma unroll
    for (int i = 0; i < Words; i += 4) {
        // Matrices (rows 0-7, columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15); the last two may be
        // missing. A lane addresses a row of a matrix as stored, which is a column of the matrix if
        // transposed.
        const int c = column + 4 * i;
        const int r_lane = Transposed ? row + lane / 8 % 2 * 8 : row + lane % 16;
        const int c_lane = Transposed ? c + lane % 8 + lane / 16 * 8 : c + lane / 16 * 8;
        if (i + 4 <= Words) {
            const u32 at = address(r_lane, c_lane);
            if constexpr (Transposed) {
                stmatrix_x4_trans(at, packed[i], packed[i + 1], packed[i + 2], packed[i + 3]);
            } else {
                stmatrix_x4(at, packed[i], packed[i + 1], packed[i + 2], packed[i + 3]);
            }
        } else {
            const u32 at = address(r_lane, Transposed ? c + lane % 8 : c);
            if constexpr (Transposed) {
                stmatrix_x2_trans(at, packed[i], packed[i + 1]);
            } else {
                stmatrix_x2(at, packed[i], packed[i + 1]);
            }
        }
    }
}

}  // namespace fa
