// A warpgroup's share of a matrix product by wgmma, from panel tiles stored in either orientation.
#pragma once
#include "ptx/wgmma.cuh"
#include "tile/descriptor.cuh"
#include "tile/panel.cuh"

namespace fa {

// How an operand is stored. Rows: its rows are the tile's rows, and the contraction runs along the panels
// (K-major). Columns: its rows run along the panels, and the contraction down the tile's rows (MN-major).
enum class Along { Rows, Columns };

// An operand: a tile, and the side of it along which the operand's rows run.
template <class Tile, Along A>
struct OperandView {
    static constexpr int kTranspose = A == Along::Columns;

    // Byte offset in the tile of row `row` (a multiple of 8, or of a panel's width) at contraction index `k`
    // (a multiple of 16).
    __host__ __device__ static constexpr u32 offset(int row, int k) {
        return A == Along::Rows ? Tile::row_offset(row) + Tile::column_offset(k)
                                : Tile::column_offset(row) + Tile::row_offset(k);
    }

    // The operand from its row `row` on.
    __device__ __forceinline__ static Descriptor descriptor(u32 address, int row) {
        // A warpgroup's share starts on a whole panel: its address is computed at run time.
        if constexpr (A == Along::Rows) {
            return descriptor_k_major<Tile>(address + row * Tile::kRowBytes);
        } else {
            return descriptor_mn_major<Tile>(address + row / Tile::kPanel * Tile::kPanelBytes);
        }
    }
};

// D[M, N] (+)= A[M, K] B[N, K]^T, M in blocks of the 64 rows of wgmma.
template <Dtype T, int M, int N, int K, class A, class B>
struct Product {
    static_assert(M % 64 == 0 && N % 8 == 0 && K % 16 == 0);
    static constexpr int kM = M;
    static constexpr int kN = N;
    static constexpr int kBlocks = M / 64;
    static constexpr int kRegisters = N / 2;  // of a block
    using Accumulators = float[kBlocks][kRegisters];
    using Instruction = wgmma::Mma<T, N>;

    // Issues `Count` blocks from block First on; the caller fences and commits.
    template <int First = 0, int Count = kBlocks>
    __device__ __forceinline__ static void issue(float (&d)[Count][kRegisters], const Descriptor& a,
                                                 const Descriptor& b, bool accumulate) {
        const Descriptor from_a = a.recomputed();
        const Descriptor from_b = b.recomputed();
#pragma unroll
        for (int block = 0; block < Count; ++block) {
#pragma unroll
            for (int k = 0; k < K; k += 16) {
                Instruction::template ss<A::kTranspose, B::kTranspose>(
                    d[block], from_a.at(A::offset(64 * (First + block), k)), from_b.at(B::offset(0, k)),
                    k != 0 || accumulate);
            }
        }
    }

    // The same with A in registers: the packed accumulators of a product with N = K.
    __device__ __forceinline__ static void issue_rs(float (&d)[kBlocks][kRegisters],
                                                    const u32 (&a)[kBlocks][K / 4], const Descriptor& b,
                                                    bool accumulate) {
        const Descriptor from_b = b.recomputed();
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
            for (int k = 0; k < K; k += 16) {
                Instruction::template rs<B::kTranspose>(d[block], a[block] + k / 4,
                                                        from_b.at(B::offset(0, k)), k != 0 || accumulate);
            }
        }
    }
};

}  // namespace fa
