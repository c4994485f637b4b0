// Twin of cuda/ptx/cluster.cuh.
#pragma once
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "types.cuh"

namespace fa {

EMU_INLINE u32 cluster_cta_count() { return emu::cluster_size(); }
EMU_INLINE u32 cluster_index() { return cta_index() / emu::cluster_size(); }

EMU_INLINE void cluster_publish(bool fences) { emu::cluster_barrier(fences); }
EMU_INLINE void cluster_exchange() {
    cta_sync();
    cluster_publish(thread_index() == 0);
}
EMU_INLINE void cluster_leave() { emu::cluster_barrier(false); }

EMU_INLINE int load_of_cluster(const int* value, u32 rank) { return int(emu::load_of_cluster(value, rank)); }
EMU_INLINE float load_of_cluster(const float* value, u32 rank) {
    return __builtin_bit_cast(float, emu::load_of_cluster(static_cast<const void*>(value), rank));
}
EMU_INLINE float4 load_of_cluster(const float4* value, u32 rank) {
    const float* words = &value->x;
    float4 theirs;
    theirs.x = load_of_cluster(words, rank);
    theirs.y = load_of_cluster(words + 1, rank);
    theirs.z = load_of_cluster(words + 2, rank);
    theirs.w = load_of_cluster(words + 3, rank);
    return theirs;
}

}  // namespace fa
