// The fifth-generation tensor core and its tensor memory (PTX ISA, "tcgen05"): cta_group::1, kind::f16.
//
// Tensor memory has 128 lanes of 512 columns of 32 bits; an address is lane << 16 | column. A warp accesses
// the 32 lanes that start at 32 * (warp % 4). MMAs, loads and stores are asynchronous; across threads they
// are ordered by fence_before(), a barrier or mbarrier, and fence_after().
#pragma once
#include "ptx/address.cuh"
#include "ptx/mbarrier.cuh"
#include "types.cuh"

namespace fa::tcgen05 {

// ---- Allocation: executed by one whole warp, always the same one ----

// Allocates `columns` columns (a power of two from 32 to 512), waiting until they are free, and writes their
// address to shared memory.
__device__ __forceinline__ void alloc(u32& holder, u32 columns) {
    asm volatile(
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(smem_address(&holder)),
        "r"(columns)
        : "memory");
}

// Gives up the right to allocate, so that other CTAs of the SM may allocate.
__device__ __forceinline__ void relinquish() {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}

// Frees columns from alloc(). A CTA frees every allocation before it exits.
__device__ __forceinline__ void dealloc(u32 address, u32 columns) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns)
                 : "memory");
}

// ---- Ordering between threads ----

// Orders this thread's earlier tcgen05 operations (loads and stores once waited for) before what other
// threads do after the barrier at which it arrives next.
__device__ __forceinline__ void fence_before() {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

// Orders this thread's later tcgen05 operations after what other threads did before the barrier on which it
// has waited.
__device__ __forceinline__ void fence_after() {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// ---- Loads and stores: executed by a whole warp, with one address in all lanes ----

// Waits for this thread's loads. pin() must follow before their registers are used.
__device__ __forceinline__ void wait_load() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }

// Keeps the compiler from moving uses of loaded registers above this point; called after wait_load().
template <int N>
__device__ __forceinline__ void pin(u32 (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// Waits for this thread's stores.
__device__ __forceinline__ void wait_store() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

// load(r, address) and store(address, r): N consecutive columns of the thread's own lane.
#define FA_OUT8(i)                                                                              \
    "=r"(r[i]), "=r"(r[i + 1]), "=r"(r[i + 2]), "=r"(r[i + 3]), "=r"(r[i + 4]), "=r"(r[i + 5]), \
        "=r"(r[i + 6]), "=r"(r[i + 7])
#define FA_IN8(i)                                                                                        \
    "r"(r[i]), "r"(r[i + 1]), "r"(r[i + 2]), "r"(r[i + 3]), "r"(r[i + 4]), "r"(r[i + 5]), "r"(r[i + 6]), \
        "r"(r[i + 7])
#define FA_L16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define FA_L32 FA_L16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FA_OUT16 FA_OUT8(0), FA_OUT8(8)
#define FA_OUT32 FA_OUT16, FA_OUT8(16), FA_OUT8(24)
#define FA_IN16 FA_IN8(0), FA_IN8(8)
#define FA_IN32 FA_IN16, FA_IN8(16), FA_IN8(24)

#define FA_TRANSFER(N)                                                                                  \
    __device__ __forceinline__ void load(u32(&r)[N], u32 address) {                                     \
        asm volatile("tcgen05.ld.sync.aligned.32x32b.x" #N ".b32 {" FA_L##N "}, [%" #N "];"             \
                     : FA_OUT##N                                                                        \
                     : "r"(address)                                                                     \
                     : "memory");                                                                       \
    }                                                                                                   \
    __device__ __forceinline__ void store(u32 address, const u32(&r)[N]) {                              \
        asm volatile("tcgen05.st.sync.aligned.32x32b.x" #N ".b32 [%" #N "], {" FA_L##N "};" ::FA_IN##N, \
                     "r"(address)                                                                       \
                     : "memory");                                                                       \
    }

FA_TRANSFER(16)
FA_TRANSFER(32)

#undef FA_TRANSFER
#undef FA_OUT8
#undef FA_IN8

// ---- MMA: issued by one thread ----

// D (+)= A B for K = 16, with 16-bit operands and f32 accumulators. `d` is D's first column, `instruction`
// the instruction descriptor (types, M, N, transposition); `a` and `b` are shared-memory descriptors
// (tile/tensor_operand.cuh).
__device__ __forceinline__ void mma_ss(u32 d, u64 a, u64 b, u32 instruction, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}\n" ::"r"(d),
        "l"(a), "l"(b), "r"(instruction), "r"(static_cast<u32>(accumulate))
        : "memory");
}

// The same with A in tensor memory: 8 columns from column `a` on, two elements per cell.
__device__ __forceinline__ void mma_ts(u32 d, u32 a, u64 b, u32 instruction, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, p;\n}\n" ::"r"(d),
        "r"(a), "l"(b), "r"(instruction), "r"(static_cast<u32>(accumulate))
        : "memory");
}

// Arrives at `bar` once all MMAs that this thread has issued are done. Implies fence_before().
__device__ __forceinline__ void commit(Mbarrier& bar) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                     smem_address(&bar))
                 : "memory");
}

}  // namespace fa::tcgen05
