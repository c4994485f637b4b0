// Tiles of Q, K, V and dO in shared memory: rows of a head dim, in panels of at least 32 columns.
#pragma once
#include "tile/panel.cuh"
#include "types.cuh"

namespace fa::sm90 {

// Columns that rows of `columns` take in shared memory: half a panel at the end, as 80 have, is stored and
// not multiplied. TMA takes a row of a panel at a time, so that narrower panels would take longer to load.
// (Planner and launch: `operand_columns`.)
__host__ __device__ constexpr int operand_columns(int columns) { return (columns + 31) / 32 * 32; }

// The widest panel of them. Panels that are read across, with the columns divided among warpgroups, must not
// straddle two shares.
__host__ __device__ constexpr int operand_panel(int columns, int share) {
    return share == columns ? widest_panel(operand_columns(columns))
                            : min_of(widest_panel(columns), widest_panel(share));
}

template <int Rows, int Columns, int Panel = operand_panel(Columns, Columns)>
using OperandTile = PanelTile<Rows, operand_columns(Columns), Panel>;

}  // namespace fa::sm90
