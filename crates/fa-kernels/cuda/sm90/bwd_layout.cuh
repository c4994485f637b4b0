// The shapes of the SM90 backward: products, warpgroups' shares of them, tiles, the order of dQ's
// accumulators.
#pragma once
#include "config.cuh"
#include "tile/product.cuh"

namespace fa::sm90 {

// A product's output [Rows, Columns] cut among warpgroups, as the tensor cores see it: transposed if swapped.
template <int Rows, int Columns, int NumWg, int AtomRows, bool Swap>
struct Cut {
    static constexpr int kAtomM = Swap ? NumWg / AtomRows : AtomRows;
    static constexpr int kAtomN = NumWg / kAtomM;
    static constexpr int kM = (Swap ? Columns : Rows) / kAtomM;  // a warpgroup's share
    static constexpr int kN = (Swap ? Rows : Columns) / kAtomN;

    // Where a warpgroup's share starts; warpgroups lie along one of the sides.
    __device__ __forceinline__ static int first_m(int wg) { return kAtomM > 1 ? wg * kM : 0; }
    __device__ __forceinline__ static int first_n(int wg) { return kAtomN > 1 ? wg * kN : 0; }
};

// The widest panel that divides both a tile's rows and a warpgroup's share of them, if read in shares.
__host__ __device__ constexpr int shared_panel(int columns, int share) {
    return min_of(widest_panel(columns), widest_panel(share));
}

// Accumulators of a product in device memory, in the order in which threads hold them, so that every access
// is of 16 neighbouring bytes a thread: [slice][warpgroup][register / 4][thread][register % 4].
template <class Cut, int NumWg, int Slices, bool Swap>
struct AccumulatorOrder {
    static constexpr int kSlice = Cut::kM * Cut::kN * NumWg / Slices;  // elements
    static constexpr int kShare = kSlice / NumWg;
    static constexpr int kBlocks = Cut::kM / 64 / Slices;

    // Where element (row, column) of the product as it is meant (not as it is swapped) is.
    __device__ __forceinline__ static int offset(int row, int column) {
        const int m = Swap ? column : row, n = Swap ? row : column;
        const int wg = Cut::kAtomM > 1 ? m / Cut::kM : n / Cut::kN;
        const int in_m = m % Cut::kM, in_n = n % Cut::kN;
        const int block = in_m / 64;
        const int thread = in_m % 64 / 16 * 32 + in_m % 8 * 4 + in_n % 8 / 2;
        const int reg = block % kBlocks * (Cut::kN / 2) + in_n / 8 * 4 + in_m % 16 / 8 * 2 + in_n % 2;
        return block / kBlocks * kSlice + wg * kShare + reg / 4 * 512 + thread * 4 + reg % 4;
    }
};

template <Sm90BwdConfig C>
struct BwdLayout {
    static_assert(C.tile_m % 16 == 0 && C.tile_n % 16 == 0 && C.head_dim % 32 == 0 && C.head_dim_v % 32 == 0);
    static_assert(C.num_wg == 2 || C.num_wg == 3);

    using CutS = Cut<C.tile_m, C.tile_n, C.num_wg, C.atom_layout_m_sdp, C.sdp_swap_ab>;
    using CutDk = Cut<C.tile_n, C.head_dim, C.num_wg, C.atom_layout_n_dkv, C.dkv_swap_ab>;
    using CutDv = Cut<C.tile_n, C.head_dim_v, C.num_wg, C.atom_layout_n_dkv, C.dkv_swap_ab>;
    using CutDq = Cut<C.tile_m, C.head_dim, C.num_wg, C.atom_layout_m_dq, C.dq_swap_ab>;

    // Panels that are read across must not straddle two warpgroups' shares.
    static constexpr int kPanelQ =
        C.dkv_swap_ab ? widest_panel(C.head_dim) : shared_panel(C.head_dim, CutDk::kN);
    static constexpr int kPanelDo =
        C.dkv_swap_ab ? widest_panel(C.head_dim_v) : shared_panel(C.head_dim_v, CutDv::kN);
    static constexpr int kPanelK =
        C.dq_swap_ab ? widest_panel(C.head_dim) : shared_panel(C.head_dim, CutDq::kN);
    using Q = PanelTile<C.tile_m, C.head_dim, kPanelQ>;
    using K = PanelTile<C.tile_n, C.head_dim, kPanelK>;
    using V = PanelTile<C.tile_n, C.head_dim_v>;
    using Do = PanelTile<C.tile_m, C.head_dim_v, kPanelDo>;

    // P and dS are stored as [tile_n][tile_m] or as [tile_m][tile_n], whichever way the panels are wider
    // (wgmma reads narrow ones slower, and stores to them collide); as the accumulators lie, if both are. One
    // product reads them across: dQ the first form, dK and dV the second. Panels must not straddle its
    // warpgroups' shares, which have to be multiples of 16 for that.
    __host__ __device__ static constexpr int pds_panel(bool rows_are_keys) {
        const int columns = rows_are_keys ? C.tile_m : C.tile_n;
        const int share =
            rows_are_keys ? (C.dq_swap_ab ? CutDq::kN : columns) : (C.dkv_swap_ab ? CutDk::kN : columns);
        return share % 16 == 0 ? shared_panel(columns, share) : 0;
    }
    static constexpr bool kPdsTransposed = pds_panel(!C.sdp_swap_ab) > pds_panel(C.sdp_swap_ab);
    static constexpr bool kPdsRowsAreKeys = C.sdp_swap_ab != kPdsTransposed;
    using Pds = PanelTile<kPdsRowsAreKeys ? C.tile_n : C.tile_m, kPdsRowsAreKeys ? C.tile_m : C.tile_n,
                          pds_panel(kPdsRowsAreKeys)>;
    static constexpr Along kByKeys = kPdsRowsAreKeys ? Along::Rows : Along::Columns;     // P^T, dS^T
    static constexpr Along kByQueries = kPdsRowsAreKeys ? Along::Columns : Along::Rows;  // dS

    using QRows = OperandView<Q, Along::Rows>;
    using KRows = OperandView<K, Along::Rows>;
    using VRows = OperandView<V, Along::Rows>;
    using DoRows = OperandView<Do, Along::Rows>;
    using QColumns = OperandView<Q, Along::Columns>;
    using KColumns = OperandView<K, Along::Columns>;
    using DoColumns = OperandView<Do, Along::Columns>;
    using PdsByKeys = OperandView<Pds, kByKeys>;
    using PdsByQueries = OperandView<Pds, kByQueries>;

    // D = First Second^T, or its transpose.
    template <class Cut, int K, bool Swap, class First, class Second>
    using Swapped =
        Product<C.dtype, Cut::kM, Cut::kN, K, Either<Swap, Second, First>, Either<Swap, First, Second>>;
    using S = Swapped<CutS, C.head_dim, C.sdp_swap_ab, QRows, KRows>;
    using Dp = Swapped<CutS, C.head_dim_v, C.sdp_swap_ab, DoRows, VRows>;
    using Dk = Swapped<CutDk, C.tile_m, C.dkv_swap_ab, PdsByKeys, QColumns>;
    using Dv = Swapped<CutDv, C.tile_m, C.dkv_swap_ab, PdsByKeys, DoColumns>;
    using Dq = Swapped<CutDq, C.tile_n, C.dq_swap_ab, PdsByQueries, KColumns>;

    // dQ is computed in slices of its blocks of 64 rows, one after another.
    static constexpr int kDqBlocks = Dq::kBlocks / C.dq_slices;
    static_assert(Dq::kBlocks % C.dq_slices == 0, "dQ is sliced between blocks of 64 rows");
    using DqOrder = AccumulatorOrder<CutDq, C.num_wg, C.dq_slices, C.dq_swap_ab>;
    using DkOrder = AccumulatorOrder<CutDk, C.num_wg, 1, C.dkv_swap_ab>;
    using DvOrder = AccumulatorOrder<CutDv, C.num_wg, 1, C.dkv_swap_ab>;
};

}  // namespace fa::sm90
