// The shared memory of the other CTAs of a cluster (PTX ISA, "mapa", "ld.shared::cluster",
// "barrier.cluster").
#pragma once
#include "ptx/address.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "types.cuh"

namespace fa {

// CTAs of the cluster; 1 in a launch without clusters.
__device__ __forceinline__ u32 cluster_cta_count() {
    u32 count;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
    return count;
}

// The cluster's index within the grid.
__device__ __forceinline__ u32 cluster_index() {
    u32 cluster;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(cluster));
    return cluster;
}

// cluster_sync() by one fence for each CTA instead of one for each thread: after a barrier of the CTA, a
// fence by one thread (`fences`) covers what all wrote before it. Fences of 1,024 threads take half a
// microsecond (NB-163).
__device__ __forceinline__ void cluster_publish(bool fences) {
    if (fences) asm volatile("fence.acq_rel.cluster;" ::: "memory");
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

// cluster_publish() with the barrier of the CTA before it.
__device__ __forceinline__ void cluster_exchange() {
    cta_sync();
    cluster_publish(thread_index() == 0);
}

// Waits for all threads of the cluster, so that a CTA whose shared memory the others access may end after it.
// It orders no memory accesses.
__device__ __forceinline__ void cluster_leave() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Reads `value` from the shared memory of CTA `rank` of the cluster. What that CTA wrote before a
// cluster_publish() is visible after it; the CTA must not have exited.
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
__device__ __forceinline__ float4 load_of_cluster(const float4* value, u32 rank) {
    float4 theirs;
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}\n"
        : "=f"(theirs.x), "=f"(theirs.y), "=f"(theirs.z), "=f"(theirs.w)
        : "r"(smem_address(value)), "r"(rank)
        : "memory");
    return theirs;
}
__device__ __forceinline__ float load_of_cluster(const float* value, u32 rank) {
    return __int_as_float(load_of_cluster(reinterpret_cast<const int*>(value), rank));
}

}  // namespace fa
