// The SM80-class backward's layout: warps' parts of the products, tiles, the order of accumulators in device
// memory, shared memory and named barriers.
#pragma once
#include "attn/bwd_tile.cuh"
#include "attn/query_range.cuh"
#include "attn/seqlen.cuh"
#include "config.cuh"
#include "ptx/atomic.cuh"
#include "tile/smem_tile.cuh"
#include "tile/warp_product.cuh"
#include "types.cuh"

namespace fa::sm80 {

// A product's output [Rows, Columns] divided among warps, AtomRows of them along the rows.
template <int Rows, int Columns, int NumWarps, int AtomRows>
struct WarpCut {
    static_assert(NumWarps % AtomRows == 0);
    static constexpr int kAtomN = NumWarps / AtomRows;
    static constexpr int kM = Rows / AtomRows;  // a warp's part
    static constexpr int kN = Columns / kAtomN;
    static_assert(kM % 16 == 0 && kN % 16 == 0 && kM * AtomRows == Rows && kN * kAtomN == Columns,
                  "a warp owns whole blocks of 16");
    static constexpr int kFragments = kM / 16;
    static constexpr int kRegisters = kN / 2;  // of an m16 fragment
    using Accumulators = float[kFragments][kRegisters];

    __device__ __forceinline__ static int first_m(int warp) { return warp % AtomRows * kM; }
    __device__ __forceinline__ static int first_n(int warp) { return warp / AtomRows * kN; }

    // In device memory accumulators are in the order in which threads hold them, so that a warp adds to
    // adjacent elements: four per thread where there are vector atomics, else one per lane.
    static constexpr int kVector = kVectorRed ? 4 : 1;
    static constexpr int kShare = kM * kN;

    // Offset of element (row, column).
    __device__ __forceinline__ static int offset(int row, int column) {
        const int warp = column / kN * AtomRows + row / kM;
        const int lane = row % 8 * 4 + column % 8 / 2;
        const int reg = row % kM / 16 * kRegisters + column % kN / 8 * 4 + row % 16 / 8 * 2 + column % 2;
        return warp * kShare + reg / kVector * (32 * kVector) + lane * kVector + reg % kVector;
    }

    // place() is a lane's first element in the warp's part of the tile at `accum`; add_part() adds one of its
    // kParts pieces.
    static constexpr int kParts = kFragments * kRegisters / 4;
    __device__ __forceinline__ static float* place(float* accum, int warp, int lane) {
        return accum + warp * kShare + lane * kVector;
    }
    __device__ __forceinline__ static void add_part(float* to, const Accumulators& d, int part) {
        const int f = part * 4 / kRegisters, i = part * 4 % kRegisters;
        float* at = to + part * 128;
        if constexpr (kVectorRed) {
            red_add_f32x4(at, d[f][i], d[f][i + 1], d[f][i + 2], d[f][i + 3]);
        } else {
#pragma unroll
            for (int n = 0; n < 4; ++n) red_add_f32(at + 32 * n, d[f][i + n]);
        }
    }
    __device__ __forceinline__ static void add(float* accum, const Accumulators& d, int warp, int lane) {
        float* to = place(accum, warp, lane);
#pragma unroll
        for (int part = 0; part < kParts; ++part) add_part(to, d, part);
    }

    __device__ __forceinline__ static void clear(Accumulators& d) {
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
#pragma unroll
            for (int i = 0; i < kRegisters; ++i) d[f][i] = 0.f;
        }
    }
};

template <Sm80BwdConfig C>
struct BwdLayout {
    static_assert(C.tile_m % 16 == 0 && C.tile_n % 16 == 0 && C.head_dim % 16 == 0 && C.head_dim_v % 16 == 0);
    static_assert(C.q_stages >= 2 && C.q_stages <= 3 && C.do_stages >= 1 && C.do_stages <= 2 &&
                  C.num_warps % 2 == 0);

    static constexpr int kThreads = 32 * C.num_warps;
    static constexpr int kGroupWarps = C.num_warps / 2;
    static constexpr int kGroupThreads = 32 * kGroupWarps;

    // Columns of dQ that the first group computes; the second computes the others.
    static constexpr int kDqFirst = C.dq_first;

    using Q = SmemTile<C.tile_m, C.head_dim, true>;
    using K = SmemTile<C.tile_n, C.head_dim, true>;
    using V = SmemTile<C.tile_n, C.head_dim_v, true>;
    using Do = SmemTile<C.tile_m, C.head_dim_v, true>;
    using Pds = SmemTile<C.tile_m, C.tile_n, true>;

    using CutS = WarpCut<C.tile_m, C.tile_n, kGroupWarps, C.atom_layout_m_sdp>;
    using CutDk = WarpCut<C.tile_n, C.head_dim, kGroupWarps, C.atom_layout_n_dkv>;
    using CutDv = WarpCut<C.tile_n, C.head_dim_v, kGroupWarps, C.atom_layout_n_dkv>;
    template <int Group>
    using CutDq =
        WarpCut<C.tile_m, Group == 0 ? kDqFirst : C.head_dim - kDqFirst, kGroupWarps, C.atom_layout_m_dq>;

    using DkOrder = CutDk;
    using DvOrder = CutDv;
    // Offset of an element of dQ among a tile's accumulators in device memory: the first group's part, then
    // the second's.
    struct DqOrder {
        __device__ __forceinline__ static int offset(int row, int column) {
            if constexpr (kDqFirst > 0) {
                if (column < kDqFirst) return CutDq<0>::offset(row, column);
            }
            return C.tile_m * kDqFirst + CutDq<1>::offset(row, column - kDqFirst);
        }
    };

    // S = Q K^T, dP = dO V^T, dV = P^T dO, dK = dS^T Q, dQ = dS K.
    using QOfS = WarpOperand<Q, Operand::A, CutS::kM>;
    using KOfS = WarpOperand<K, Operand::BStoredNK, CutS::kN>;
    using DoOfDp = WarpOperand<Do, Operand::A, CutS::kM>;
    using VOfDp = WarpOperand<V, Operand::BStoredNK, CutS::kN>;
    using POfDv = WarpOperand<Pds, Operand::AStoredKM, CutDv::kM>;
    using DoOfDv = WarpOperand<Do, Operand::BStoredKN, CutDv::kN>;
    using DsOfDk = WarpOperand<Pds, Operand::AStoredKM, CutDk::kM>;
    using QOfDk = WarpOperand<Q, Operand::BStoredKN, CutDk::kN>;
    template <int Group>
    using DsOfDq = WarpOperand<Pds, Operand::A, CutDq<Group>::kM>;
    template <int Group>
    using KOfDq = WarpOperand<K, Operand::BStoredKN, CutDq<Group>::kN>;
};

// A step: one tile of queries of one query head.
struct alignas(8) BwdStep {
    int head, m_block;

    __device__ __forceinline__ BwdStep next(const BlockRange& range) const {
        return m_block + 1 < range.end ? BwdStep{head, m_block + 1} : BwdStep{head + 1, range.begin};
    }
    __device__ __forceinline__ BwdStep previous(const BlockRange& range) const {
        return m_block > range.begin ? BwdStep{head, m_block - 1} : BwdStep{head - 1, range.end - 1};
    }
};

// Whether dS is of P times the slope of what changes the scores.
template <Sm80BwdConfig C>
constexpr bool kSlopedP = C.softcap || kScoreSlope || weighs();

// ---- Shared memory ------------------------------------------------------------------------------

struct NoSeqlen {};

// The planner's account names the same buffers in the same order; the generated unit asserts the size.
template <Sm80BwdConfig C>
struct alignas(128) BwdStorage {
    using L = BwdLayout<C>;
    alignas(128) u8 q[C.q_stages][L::Q::kBytes];
    alignas(128) u8 dout[C.do_stages][L::Do::kBytes];
    alignas(128) u8 k[L::K::kBytes];
    alignas(128) u8 v[L::V::kBytes];
    // P, and with a soft cap or a program that has a slope P times the slope.
    alignas(128) u8 p[kSlopedP<C> ? 2 : 1][L::Pds::kBytes];
    alignas(128) u8 ds[L::Pds::kBytes];
    // The base-2 LSE belongs to each Q buffer, dPsum to each dO buffer.
    alignas(128) float lse[C.q_stages][C.tile_m];
    alignas(128) float dpsum[C.do_stages][C.tile_m];
    // The CTA's work tile, in shared memory because registers are scarcer than reads.
    BwdTileOf<C.varied> tile;
    BlockRange range;
    BwdStep step[2];  // each group's current step
    int descending;   // see descends(); used only if can_descend()
    [[no_unique_address]] Either<C.varied, Seqlen<true>, NoSeqlen> seqlen;
};

// ---- Barriers -----------------------------------------------------------------------------------

enum BwdBarrier : int {
    kBarrierBlock = 1,  // all threads: a step begins (0 is cta_sync)
    kBarrierPRead,      // all threads: P has been read and may be written again
    kBarrierDsRead,     // all threads: dS has been read and may be written again
    kBarrierDs,         // dS has been written; with one dO buffer all threads: dO has been read
    kBarrierGroup,      // the threads of one group: this id for the P warps, the next for the dS warps
};

}  // namespace fa::sm80
