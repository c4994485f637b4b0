// The shared memory of the other CTAs of a cluster (PTX ISA, "mapa", "ld.shared::cluster").
#pragma once
#include "ptx/address.cuh"
#include "types.cuh"

namespace fa {

// Reads the word `value` from the shared memory of CTA `rank` of the cluster. What that CTA wrote before a
// cluster_sync() is visible after it; the CTA must not have exited.
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
