// A warp's share of a matrix product by ldmatrix and mma.sync, with both operands in shared memory.
#pragma once
#include "config.cuh"
#include "ptx/mma_sync.cuh"
#include "tile/fragment.cuh"
#include "types.cuh"

namespace fa {

// A warp's share of one operand: `Span` of its rows (A) or columns (B) from `first` on, both multiples of 16.
template <class Tile, Operand O, int Span>
struct WarpOperand {
    // Whether the share is of the tile's columns. Its offset is folded into the lane's, unless a share can
    // straddle panels.
    static constexpr bool kAcross = O == Operand::AStoredKM || O == Operand::BStoredKN;
    static constexpr bool kFolded = !kAcross || Tile::kPanel % Span == 0 || Span % Tile::kPanel == 0;
    static constexpr int kBlocks = Span / 16;

    FragmentReader<Tile, O, true> reader;
    int first;

    __device__ __forceinline__ WarpOperand(int first, int lane) : reader(lane), first(first) {
        if constexpr (!kAcross) {
            reader.lane_offset += first * Tile::kRowBytes;
        } else if constexpr (kFolded) {
            reader.lane_offset = (reader.lane_offset ^ Tile::chunk(first) << 4) + Tile::panel_offset(first);
        }
    }

    // Block `block` of the share in contraction step `step`, each of 16.
    __device__ __forceinline__ void read(u32 (&regs)[4], u32 address, int block, int step) const {
        if constexpr (kAcross) {
            reader.read(regs, address, 16 * step, (kFolded ? 0 : first) + 16 * block);
        } else {
            reader.read(regs, address, 16 * block, 16 * step);
        }
    }
};

// The default Interleave: nothing runs between the products.
struct NoInterleave {
    template <int Rounds>
    __device__ __forceinline__ void round(int) const {}
};

// D += A B over `Steps` contraction steps of 16; `d` is indexed by m16 fragment. Operands are read ahead of
// their use: A by `AheadA` steps (0 or 1), B by `AheadB` blocks. `interleave.round<Rounds>(number)` runs
// after each of the Rounds = Steps * B::kBlocks rounds of products.
template <Dtype T, int Steps, int AheadA, int AheadB, class A, class B, class Interleave = NoInterleave>
__device__ __forceinline__ void warp_multiply(float (&d)[A::kBlocks][8 * B::kBlocks], const A& a,
                                              u32 address_a, const B& b, u32 address_b,
                                              const Interleave& interleave = {}) {
    constexpr int kBlocks = B::kBlocks, kTotal = Steps * kBlocks;
    constexpr int kAhead = min_of(AheadB, kTotal), kRingA = AheadA + 1, kRingB = kAhead + 1;
    u32 of_a[kRingA][A::kBlocks][4], of_b[kRingB][4];
    auto read_a = [&](int step) {
#pragma unroll
        for (int f = 0; f < A::kBlocks; ++f) a.read(of_a[step % kRingA][f], address_a, f, step);
    };
    auto read_b = [&](int i) { b.read(of_b[i % kRingB], address_b, i % kBlocks, i / kBlocks); };
#pragma unroll
    for (int step = 0; step < AheadA; ++step) read_a(step);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) read_b(i);
#pragma unroll
    for (int i = 0; i < kTotal; ++i) {
        const int step = i / kBlocks, n = i % kBlocks;
        if (n == 0 && step + AheadA < Steps) read_a(step + AheadA);
        if (i + kAhead < kTotal) read_b(i + kAhead);
#pragma unroll
        for (int f = 0; f < A::kBlocks; ++f) {
            mma_m16n8k16<T>(d[f] + 8 * n, of_a[step % kRingA][f], of_b[i % kRingB][0], of_b[i % kRingB][1]);
            mma_m16n8k16<T>(d[f] + 8 * n + 4, of_a[step % kRingA][f], of_b[i % kRingB][2],
                            of_b[i % kRingB][3]);
        }
        interleave.template round<kTotal>(i);
    }
}

}  // namespace fa
