// Twin of cuda/ptx/cluster.cuh.
#pragma once
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "types.cuh"

namespace fa {

EMU_INLINE void cluster_exchange() {
    cta_sync();
    emu::cluster_barrier(thread_index() == 0);
}
EMU_INLINE void cluster_leave() { emu::cluster_barrier(false); }

EMU_INLINE int load_of_cluster(const int* value, u32 rank) { return int(emu::load_of_cluster(value, rank)); }

}  // namespace fa
