// Tiles of Q, K, V and dO in shared memory: rows of a head dim, in panels.
#pragma once
#include "tile/panel.cuh"
#include "types.cuh"

namespace fa::sm90 {

// Columns that a row of `columns` takes in shared memory: 80 take 96, of which the last 16 are stored but not
// multiplied. TMA writes one row of a panel at a time, so narrower panels would take longer to load. (Planner
// and launch: `operand_columns`.)
__host__ __device__ constexpr int operand_columns(int columns) { return (columns + 31) / 32 * 32; }

// The widest panel for such rows. If warpgroups divide the columns in shares of `share`, no panel may
// straddle two shares.
__host__ __device__ constexpr int operand_panel(int columns, int share) {
    return share == columns ? widest_panel(operand_columns(columns))
                            : min_of(widest_panel(columns), widest_panel(share));
}

template <int Rows, int Columns, int Panel = operand_panel(Columns, Columns)>
using OperandTile = PanelTile<Rows, operand_columns(Columns), Panel>;

}  // namespace fa::sm90
