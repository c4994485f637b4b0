// The SM90 backward's layout: warpgroups' parts of the products, tiles, the order of dQ's accumulators,
// registers, named barriers and shared memory.
#pragma once
#include "attn/ahead_copies.cuh"
#include "attn/bwd_tile.cuh"
#include "attn/programs.cuh"
#include "attn/query_range.cuh"
#include "attn/seqlen.cuh"
#include "attn/visibility.cuh"
#include "bwd_params.cuh"
#include "config.cuh"
#include "ptx/atomic.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warp.cuh"
#include "sm90/operand.cuh"
#include "tile/pipeline.cuh"
#include "tile/product.cuh"

namespace fa::sm90 {

// A product's output [Rows, Columns] divided among warpgroups, as wgmma computes it: transposed with Swap.
template <int Rows, int Columns, int NumWg, int AtomRows, bool Swap>
struct Cut {
    static constexpr int kAtomM = Swap ? NumWg / AtomRows : AtomRows;
    static constexpr int kAtomN = NumWg / kAtomM;
    static constexpr int kM = (Swap ? Columns : Rows) / kAtomM;  // a warpgroup's part
    static constexpr int kN = (Swap ? Rows : Columns) / kAtomN;

    // Start of a warpgroup's part; warpgroups are arranged along one of the two sides.
    __device__ __forceinline__ static int first_m(int wg) { return kAtomM > 1 ? wg * kM : 0; }
    __device__ __forceinline__ static int first_n(int wg) { return kAtomN > 1 ? wg * kN : 0; }
};

// The widest panel that divides both a row of P or dS and, if warpgroups read parts of it, a warpgroup's
// part.
__host__ __device__ constexpr int shared_panel(int columns, int share) {
    return min_of(widest_panel(columns), widest_panel(share));
}

// The order of a product's accumulators in device memory: that of the threads' registers, so that every
// access has 16 contiguous bytes per thread: [slice][warpgroup][register / 4][thread][register % 4].
template <class Cut, int NumWg, int Slices, bool Swap>
struct AccumulatorOrder {
    static constexpr bool kTransposed = Swap;
    static constexpr int kSlice = Cut::kM * Cut::kN * NumWg / Slices;  // elements
    static constexpr int kShare = kSlice / NumWg;
    static constexpr int kBlocks = Cut::kM / 64 / Slices;

    // Offset of element (row, column) of the product, counted before any swap.
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
    static_assert(C.tile_m % 16 == 0 && C.tile_n % 16 == 0 && C.head_dim % 16 == 0 && C.head_dim_v % 16 == 0);
    static_assert(C.num_wg == 2 || C.num_wg == 3);

    using CutS = Cut<C.tile_m, C.tile_n, C.num_wg, C.atom_layout_m_sdp, C.sdp_swap_ab>;
    using CutDk = Cut<C.tile_n, C.head_dim, C.num_wg, C.atom_layout_n_dkv, C.dkv_swap_ab>;
    using CutDv = Cut<C.tile_n, C.head_dim_v, C.num_wg, C.atom_layout_n_dkv, C.dkv_swap_ab>;
    using CutDq = Cut<C.tile_m, C.head_dim, C.num_wg, C.atom_layout_m_dq, C.dq_swap_ab>;

    // Columns of Q, dO and K are divided among warpgroups in dK, dV and dQ, unless those are transposed.
    static constexpr int kPanelQ = operand_panel(C.head_dim, C.dkv_swap_ab ? C.head_dim : CutDk::kN);
    static constexpr int kPanelDo = operand_panel(C.head_dim_v, C.dkv_swap_ab ? C.head_dim_v : CutDv::kN);
    static constexpr int kPanelK = operand_panel(C.head_dim, C.dq_swap_ab ? C.head_dim : CutDq::kN);
    static_assert((C.dkv_swap_ab || (CutDk::kN % 16 == 0 && CutDv::kN % 16 == 0)) &&
                      (C.dq_swap_ab || CutDq::kN % 16 == 0),
                  "a share of columns is whole panels");
    using Q = OperandTile<C.tile_m, C.head_dim, kPanelQ>;
    using K = OperandTile<C.tile_n, C.head_dim, kPanelK>;
    using V = OperandTile<C.tile_n, C.head_dim_v>;
    using Do = OperandTile<C.tile_m, C.head_dim_v, kPanelDo>;

    // P and dS are stored as [tile_n][tile_m] or [tile_m][tile_n], whichever has the wider panels (wgmma
    // reads narrow ones more slowly, and stores to them have bank conflicts); if both are equally wide, in
    // the accumulators' order. One product reads them along the rows: dQ in the first form, dK and dV in the
    // second. Panels must not straddle the parts of that product's warpgroups, which therefore have to be
    // multiples of 16.
    __host__ __device__ static constexpr int pds_panel(bool rows_are_keys) {
        const int columns = rows_are_keys ? C.tile_m : C.tile_n;
        const int share =
            rows_are_keys ? (C.dq_swap_ab ? CutDq::kN : columns) : (C.dkv_swap_ab ? CutDk::kN : columns);
        return share % 16 == 0 ? shared_panel(columns, share) : 0;
    }
    // A dS that is stored as an array's gradient has rows of queries.
    static constexpr bool kPdsTransposed = stores_scores_gradient()
                                               ? C.sdp_swap_ab
                                               : pds_panel(!C.sdp_swap_ab) > pds_panel(C.sdp_swap_ab);
    static constexpr bool kPdsRowsAreKeys = C.sdp_swap_ab != kPdsTransposed;
    static_assert(!stores_scores_gradient() || (!kPdsRowsAreKeys && pds_panel(false) > 0));
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

    // The product D = First Second^T, or its transpose with Swap.
    template <class Cut, int K, bool Swap, class First, class Second>
    using Swapped =
        Product<C.dtype, Cut::kM, Cut::kN, K, Either<Swap, Second, First>, Either<Swap, First, Second>>;
    using S = Swapped<CutS, C.head_dim, C.sdp_swap_ab, QRows, KRows>;
    using Dp = Swapped<CutS, C.head_dim_v, C.sdp_swap_ab, DoRows, VRows>;
    using Dk = Swapped<CutDk, C.tile_m, C.dkv_swap_ab, PdsByKeys, QColumns>;
    using Dv = Swapped<CutDv, C.tile_m, C.dkv_swap_ab, PdsByKeys, DoColumns>;
    using Dq = Swapped<CutDq, C.tile_n, C.dq_swap_ab, PdsByQueries, KColumns>;

    // dQ is computed in slices of its 64-row blocks, one after another.
    static constexpr int kDqBlocks = Dq::kBlocks / C.dq_slices;
    static_assert(Dq::kBlocks % C.dq_slices == 0, "dQ is sliced between blocks of 64 rows");
    using DqOrder = AccumulatorOrder<CutDq, C.num_wg, C.dq_slices, C.dq_swap_ab>;
    using DkOrder = AccumulatorOrder<CutDk, C.num_wg, 1, C.dkv_swap_ab>;
    using DvOrder = AccumulatorOrder<CutDv, C.num_wg, 1, C.dkv_swap_ab>;
};

template <Sm90BwdConfig C>
struct BwdTraits : BwdLayout<C> {
    static constexpr int kConsumers = 128 * C.num_wg;
    static constexpr int kConsumerWarps = 4 * C.num_wg;
    // Registers per thread after setmaxnreg: the consumers get what the producers leave of the SM's 64K, in
    // multiples of 8. With lengths on the device and direct additions of dQ, the producer would spill at 24.
    static constexpr bool kWideProducer = C.varied && !C.dq_via_smem;
    static constexpr int kProducerRegs = C.num_wg == 2 ? (kWideProducer ? 40 : 24) : 32;
    static constexpr int kConsumerRegs = C.num_wg == 2 ? (kWideProducer ? 232 : 240) : 160;
    static constexpr int kStatBytes = C.tile_m * 4;

    // What a consumer's warp copies of an array that its program reads ahead, for each block of 64 rows.
    using Copies = AheadCopies<ScorePlace<C.sdp_swap_ab>, BwdLayout<C>::S::kRegisters>;
    using AheadParts = AheadTiles<Copies, kConsumerWarps * BwdLayout<C>::S::kBlocks>;

    // The order within a step, chosen by measurement on an H100. kDqAhead: where shared memory has bandwidth
    // to spare, the wait for the dQ buffer comes before dQ's product, and the buffer is announced during the
    // next step's products. (Shared memory has none to spare with 64-row tiles at head dim 128, or with P in
    // shared memory.) kStoreFirst: a short dV is issued after dS is stored; issued before, it would delay
    // what the other warpgroups wait for.
    static constexpr bool kShortDv = C.head_dim_v < 128;
    static constexpr bool kDqAhead = C.mma_dkv_is_rs && C.dq_via_smem && (kShortDv || C.tile_m > 64);
    static constexpr bool kStoreFirst = C.mma_dkv_is_rs && kShortDv;

    static_assert(!C.mma_dkv_is_rs || (C.sdp_swap_ab && !C.dkv_swap_ab && C.atom_layout_m_sdp == 1 &&
                                       C.atom_layout_n_dkv == C.num_wg),
                  "registers are an operand only of the warpgroup that computed them");
    static_assert(!C.whole_keys || (!C.dq_via_smem && !C.dq_swap_ab && !C.deterministic && !C.varied &&
                                    C.mask != MaskKind::Window && !kMaskProgram),
                  "every query sees a key of the only tile, which stores its dQ from registers");
};

// Named barriers; 0 is cta_sync.
enum BwdBarrier : int { kPdsReady = 1, kPdsFree = 2, kDqReady = 3, kDqFree = 6 };

// ---- Shared memory ------------------------------------------------------------------------------

template <int Bytes, int Stages>
struct TileStages {
    alignas(1024) u8 tiles[Stages][Bytes];
};
struct NoTile {};

template <Sm90BwdConfig C>
using Tile = BwdTileOf<C.varied>;

// A work tile as all roles see it.
template <Sm90BwdConfig C>
struct BwdWork {
    Tile<C> tile;
    BlockRange range;  // tiles of queries
    int walk;          // as passed to query_block()

    __device__ __forceinline__ static BwdWork of(const BwdParams& params, int index) {
        BwdWork work;
        work.tile = bwd_tile_at<C>(params, index);
        const auto seqlen = Seqlen<C.varied>::of(params, work.tile.batch);
        if constexpr (C.varied) {
            work.tile.queries = WorkspacePlace::of_queries<C.tile_m>(params, seqlen, work.tile.batch);
        }
        const Visibility<C.mask, C.varied> visible{params.shape, seqlen};
        const Blocks blocks =
            query_list<mask_tile_words<C>()>(params, work.tile.batch, work.tile.kv_head, work.tile.n_block);
        work.range = blocks.within(query_blocks<C.tile_m, C.tile_n>(visible, work.tile.n_block * C.tile_n));
        work.walk = query_walk<C>(params, work.tile, seqlen.k(), work.range);
        return work;
    }

    __device__ __forceinline__ bool empty() const {
        return range.empty() || tile.first_head >= tile.end_head;
    }
};

// What persistent kernels need to draw their tiles: barriers that say that K and V have been read, the next
// tile and, where lengths are on the device, its sequence's.
template <Sm90BwdConfig C>
struct BwdDraws {
    Mbarrier k_empty, v_empty;
    PipelineBarriers<1> bars;
    BwdWork<C> work;
    int is_last;
    [[no_unique_address]] Either<C.varied, Seqlen<true>, NoTile> seqlen;
};

// The planner's account names the same buffers in the same order; the generated unit asserts the size.
template <Sm90BwdConfig C>
struct alignas(1024) BwdStorage {
    using T = BwdTraits<C>;
    alignas(1024) u8 q[C.q_stages][T::Q::kBytes];
    alignas(1024) u8 k[T::K::kBytes];
    alignas(1024) u8 v[T::V::kBytes];
    alignas(1024) u8 dout[C.do_stages][T::Do::kBytes];
    [[no_unique_address]] Either<C.mma_dkv_is_rs, NoTile, TileStages<T::Pds::kBytes, C.pds_stages>> p;
    alignas(1024) u8 ds[C.pds_stages][T::Pds::kBytes];
    [[no_unique_address]] Either<C.dq_via_smem, TileStages<T::DqOrder::kSlice * 4, 1>, NoTile> dq;
    alignas(128) float lse[C.do_stages][C.tile_m];
    alignas(128) float dpsum[C.do_stages][C.tile_m];
    [[no_unique_address]] typename T::AheadParts ahead;
    Mbarrier k_full;
    Mbarrier v_full;
    PipelineBarriers<C.q_stages> q_bars;
    PipelineBarriers<C.do_stages> do_bars;
    [[no_unique_address]] Either<C.persistent, BwdDraws<C>, NoTile> draws;
    int ticket;
};

}  // namespace fa::sm90
