// Twin of cuda/ptx/cluster.cuh.
#pragma once
#include "types.cuh"

namespace fa {

EMU_INLINE int load_of_cluster(const int* value, u32 rank) { return int(emu::load_of_cluster(value, rank)); }

}  // namespace fa
