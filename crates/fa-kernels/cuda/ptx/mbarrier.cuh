// mbarriers: barriers in shared memory that count arrivals and TMA's bytes (PTX ISA, "mbarrier").
#pragma once
#include "ptx/address.cuh"
#include "types.cuh"

namespace fa {

// The 64-bit barrier object. A phase completes when all its expected arrivals and bytes are in.
struct alignas(8) Mbarrier {
    u64 state;
};

// Initialises the barrier for `arrivals` per phase. One thread calls it, before any other use.
__device__ __forceinline__ void mbarrier_init(Mbarrier& bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(&bar)), "r"(arrivals)
                 : "memory");
}

// Makes initialised barriers visible to TMA. Called by the thread that initialised them.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives once, releasing this thread's earlier writes.
__device__ __forceinline__ void mbarrier_arrive(Mbarrier& bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(&bar)) : "memory");
}

// Arrives at the same barrier in CTA `rank` of the cluster. It does not release this thread's writes: it
// signals only that reads are done of data that TMA overwrites.
__device__ __forceinline__ void mbarrier_arrive_remote(Mbarrier& bar, u32 rank) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(smem_address(&bar)),
        "r"(rank)
        : "memory");
}

// Arrives once and adds `bytes`, which TMA will deliver, to what this phase expects.
__device__ __forceinline__ void mbarrier_arrive_expect(Mbarrier& bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(&bar)),
                 "r"(bytes)
                 : "memory");
}

// Waits for the phase of this parity to complete.
__device__ __forceinline__ void mbarrier_wait(Mbarrier& bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n}\n" ::"r"(smem_address(&bar)),
        "r"(parity)
        : "memory");
}

}  // namespace fa
