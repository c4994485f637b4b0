// Twin of cuda/ptx/grid.cuh. A grid runs alone; that it accesses nothing of the prior one's before its wait is
// checked.
#pragma once
#include "types.cuh"

namespace fa {

EMU_INLINE void launch_dependents() {}
EMU_INLINE void wait_for_prior_grid() { emu::wait_for_prior_grid(); }

}  // namespace fa
