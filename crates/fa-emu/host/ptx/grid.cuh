// Twin of cuda/ptx/grid.cuh. Launches run one after another.
#pragma once
#include "types.cuh"

namespace fa {

EMU_INLINE void wait_for_launches_before() {}
EMU_INLINE void let_next_launch_start() {}

}  // namespace fa
