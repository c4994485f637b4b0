// The tcgen05 instructions in the order that they ask for: S = A B^T by operands in shared memory, P = S in
// 16 bits by a warpgroup, O = P B by P in tensor memory. Tests change a statement and expect a finding.
#include "attn/store_rows.cuh"
#include "ptx/address.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "tile/descriptor.cuh"
#include "tile/panel.cuh"
#include "tile/stmatrix_tile.cuh"

using namespace fa;

struct ProbeParams {
    const u16* a;  // [128, 64]
    const u16* b;  // [64, 64]
    float* out;    // [128, 64]
};

using A = PanelTile<128, 64>;
using B = PanelTile<64, 64>;

struct alignas(1024) Storage {
    alignas(1024) u8 a[A::kBytes];
    alignas(1024) u8 b[B::kBytes];
    Mbarrier s_full, p_full, o_full;
    u32 tensor;
};

constexpr u32 kColumns = 256, kS = 0, kP = 64, kO = 128;
// f32 sums of bf16 operands, 128 x 64.
constexpr u32 kInstruction = 1u << 4 | 1u << 7 | 1u << 10 | 64u / 8 << 17 | 128u / 16 << 24;
constexpr u32 kTransposedB = 1u << 16;
constexpr u32 kVersion = 1u << 14;  // bit 46

__device__ __forceinline__ void copy_rows(u8* to, const u16* from, int rows) {
    for (int chunk = thread_index(); chunk < rows * 8; chunk += cta_threads()) {
        *reinterpret_cast<Vec16*>(to + swizzled<128>(chunk * 16)) =
            *reinterpret_cast<const Vec16*>(from + chunk * 8);
    }
}

extern "C" __global__ void __launch_bounds__(160) probe(const __grid_constant__ ProbeParams params) {
    auto& smem = shared_memory<Storage>();
    const int warp = warp_index();
    if (warp == 4) {
        tcgen05::alloc(smem.tensor, kColumns);
        tcgen05::relinquish();
        if (elect_one()) {
            mbarrier_init(smem.s_full, 1);
            mbarrier_init(smem.p_full, 4);
            mbarrier_init(smem.o_full, 1);
            mbarrier_init_fence();
        }
    }
    copy_rows(smem.a, params.a, 128);
    copy_rows(smem.b, params.b, 64);
    fence_async_shared();
    cta_sync();
    const u32 base = smem.tensor;
    if (warp == 4) {
        if (elect_one()) {
            Descriptor a = descriptor_k_major<A>(smem_address(smem.a));
            Descriptor b = descriptor_k_major<B>(smem_address(smem.b));
            Descriptor columns = descriptor_mn_major<B>(smem_address(smem.b));
            a.high |= kVersion, b.high |= kVersion, columns.high |= kVersion;
            for (int k = 0; k < 64; k += 16) {
                tcgen05::mma_ss(base + kS, a.at(A::column_offset(k)), b.at(B::column_offset(k)), kInstruction,
                                k != 0);
            }
            tcgen05::commit(smem.s_full);
            mbarrier_wait(smem.p_full, 0);
            tcgen05::fence_after();  // of the products
            for (int k = 0; k < 64; k += 16) {
                tcgen05::mma_ts(base + kO, base + kP + k / 2, columns.at(B::row_offset(k)),
                                kInstruction | kTransposedB, k != 0);
            }
            // Another S goes here.
            tcgen05::commit(smem.o_full);
        }
        warp_sync();
    } else {
        const u32 own = base + (u32(32 * warp) << 16);
        mbarrier_wait(smem.s_full, 0);
        tcgen05::fence_after();  // of the scores
        u32 s[2][32], p[32];
        tcgen05::load(s[0], own + kS);
        tcgen05::load(s[1], own + kS + 32);
        tcgen05::wait_load();  // of the scores
        tcgen05::pin(s[0]);
        tcgen05::pin(s[1]);
#pragma unroll
        for (int i = 0; i < 32; ++i)
            p[i] = pack<Dtype::Bf16>(float_of_bits(s[i / 16][2 * i % 32]),
                                     float_of_bits(s[i / 16][2 * i % 32 + 1]));
        tcgen05::store(own + kP, p);
        tcgen05::wait_store();
        tcgen05::fence_before();  // of P
        warp_sync();
        if (elect_one()) mbarrier_arrive(smem.p_full);
        mbarrier_wait(smem.o_full, 0);
        tcgen05::fence_after();  // of O
        tcgen05::load(s[0], own + kO);
        tcgen05::load(s[1], own + kO + 32);
        tcgen05::wait_load();
        tcgen05::pin(s[0]);
        tcgen05::pin(s[1]);
#pragma unroll
        for (int i = 0; i < 64; ++i) params.out[thread_index() * 64 + i] = float_of_bits(s[i / 32][i % 32]);
        tcgen05::fence_before();  // of the end
    }
    cta_sync();              // at the end
    tcgen05::fence_after();  // of the end
    if (warp == 4) tcgen05::dealloc(base, kColumns);
}
