// The shared memory of the other CTAs of a cluster (PTX ISA, "mapa", "ld.shared::cluster",
// "barrier.cluster").
#pragma once
#include "ptx/address.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "types.cuh"

namespace fa {

// cluster_sync() by one fence for each CTA instead of one for each thread: a fence after a barrier covers
// what all threads wrote before it. Fences of 1,024 threads take half a microsecond (NB-163).
__device__ __forceinline__ void cluster_exchange() {
    cta_sync();
    if (thread_index() == 0) asm volatile("fence.acq_rel.cluster;" ::: "memory");
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

// Waits for all threads of the cluster, so that a CTA whose shared memory the others access may end after it.
// It orders no memory accesses.
__device__ __forceinline__ void cluster_leave() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Reads the word `value` from the shared memory of CTA `rank` of the cluster. What that CTA wrote before a
// cluster_exchange() is visible after it; the CTA must not have exited.
__device__ __forceinline__ int load_of_cluster(const int* value, u32 rank) {
    int theirs;
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %1, %2;\n"
        "ld.shared::cluster.u32 %0, [remote];\n}\n"
        : "=r"(theirs)
        : "r"(smem_address(value)), "r"(rank)
        : "memory");
    return theirs;
}

}  // namespace fa
