// Attention backward for SM80 and later: a block owns a tile of keys and walks the tiles of queries that see it. All warps load by
// cp.async and multiply by mma.sync; weights and their gradients change hands through shared memory.
#pragma once
#include "attn/bwd_prepare.cuh"
#include "attn/bwd_tile.cuh"
#include "attn/mask.cuh"
#include "attn/query_range.cuh"
#include "attn/softmax.cuh"
#include "attn/store_rows.cuh"
#include "config.cuh"
#include "params.cuh"
#include "ptx/address.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/sync.cuh"
#include "sm80/bwd_finish.cuh"
#include "sm80/bwd_layout.cuh"
#include "tile/copy_tile.cuh"

namespace fa::sm80 {

// ---- Shared memory ----------------------------------------------------------------------------------------------------

// The planner's account names the same buffers in the same order; the generated unit asserts the size.
template <Sm80BwdConfig C>
struct alignas(128) BwdStorage {
    using L = BwdLayout<C>;
    alignas(128) u8 q[C.q_stages][L::Q::kBytes];
    alignas(128) u8 dout[C.do_stages][L::Do::kBytes];
    alignas(128) u8 k[L::K::kBytes];
    alignas(128) u8 v[L::V::kBytes];
    alignas(128) u8 p[L::Pds::kBytes];
    alignas(128) u8 ds[L::Pds::kBytes];
    // What the block is to do: registers are scarcer than reads of shared memory.
    BwdTile tile;
    BlockRange range;
};

// A thread's place, worked out anew wherever it is needed: registers are scarcer than instructions.
struct Place {
    int warp, lane;

    // `block` is not negative, which the compiler does not know: it cannot do this once before the loop over blocks.
    __device__ __forceinline__ explicit Place(int block = 0) {
        const int thread = thread_index_reread() + (u32(block) >> 31);
        warp = thread / 32;
        lane = thread % 32;
    }
};

// ---- A block's walk ---------------------------------------------------------------------------------------------------

template <Sm80BwdConfig C>
struct BwdWalk {
    using L = BwdLayout<C>;
    using CutS = typename L::CutS;
    using CutDk = typename L::CutDk;
    using CutDv = typename L::CutDv;
    using CutDq = typename L::CutDq;

    BwdStorage<C>& smem;
    const BwdParams& params;
    const BwdTile& tile = smem.tile;
    const BlockRange& range = smem.range;

    typename CutDk::Accumulators dk;
    typename CutDv::Accumulators dv;
    int stage = 0;  // of the buffers that are doubled

    // ---- Copies ----

    __device__ __forceinline__ u32 q_buffer(int at) const { return smem_address(smem.q) + (C.q_stages > 1 ? at * L::Q::kBytes : 0); }
    __device__ __forceinline__ u32 do_buffer(int at) const { return smem_address(smem.dout) + (C.do_stages > 1 ? at * L::Do::kBytes : 0); }

    template <class Tile>
    __device__ __forceinline__ static void load(u32 to, const void* tensor, const RowStrides& strides, int batch, int head, int row, int end,
                                                int columns) {
        const u16* from = static_cast<const u16*>(tensor) + batch * strides.batch + head * strides.head;
        TileCopy<Tile, L::kThreads>{from, strides.seq, columns}.template start<true>(to, row, end);
    }
    __device__ __forceinline__ void load_q(int head, int block, int to) const {
        load<typename L::Q>(q_buffer(to), params.q, params.q_strides, tile.batch, head, block * C.tile_m, params.seqlen_q, params.head_dim);
    }
    __device__ __forceinline__ void load_do(int head, int block, int to) const {
        load<typename L::Do>(do_buffer(to), params.dout, params.dout_strides, tile.batch, head, block * C.tile_m, params.seqlen_q,
                             params.head_dim_v);
    }

    // ---- One tile of queries ----

    // A statistic of the thread's rows, [fragment][upper or lower half].
    __device__ __forceinline__ void read_stats(float (&of)[CutS::kFragments][2], const float* stats, int head, int block) const {
        const Place place(block);
        const float* rows = stats + (i64(tile.batch) * params.heads_q + head) * params.m_blocks * C.tile_m + block * C.tile_m +
                            CutS::first_m(place.warp) + place.lane / 4;
#pragma unroll
        for (int f = 0; f < CutS::kFragments; ++f) {
            of[f][0] = rows[16 * f];
            of[f][1] = rows[16 * f + 8];
        }
    }

    // Scores to weights, in place.
    __device__ __forceinline__ void weigh(typename CutS::Accumulators& s, const float (&lse)[CutS::kFragments][2], int block) const {
        const Place place(block);
        const bool masked = range.needs_mask(block);
        const float scale_log2 = C.softcap ? kLog2e : params.scale_log2;
#pragma unroll
        for (int f = 0; f < CutS::kFragments; ++f) {
            if constexpr (C.softcap) cap_scores(s[f], 2.f * kLog2e * params.scale / params.softcap, params.softcap);
            if (masked) {
                const int first_key = tile.n_block * C.tile_n + CutS::first_n(place.warp) + 2 * (place.lane % 4);
                ColumnLimits limits;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int query = block * C.tile_m + CutS::first_m(place.warp) + 16 * f + 8 * r + place.lane / 4;
                    limits.begin[r] = keys_begin<C.mask>(params, query) - first_key;
                    limits.end[r] = keys_end<C.mask>(params, query) - first_key;
                }
                mask_scores<C.mask == MaskKind::Window>(s[f], limits);
            }
#pragma unroll
            for (int i = 0; i < CutS::kRegisters; ++i) s[f][i] = exp2_approx(fmaf(s[f][i], scale_log2, -lse[f][i >> 1 & 1]));
        }
    }

    // dS = P (dP - dPsum), in the place of dP.
    __device__ __forceinline__ void differentiate(const typename CutS::Accumulators& p, typename CutS::Accumulators& dp,
                                                  const float (&lse)[CutS::kFragments][2], const float (&dpsum)[CutS::kFragments][2]) const {
#pragma unroll
        for (int f = 0; f < CutS::kFragments; ++f) {
#pragma unroll
            for (int i = 0; i < CutS::kRegisters; ++i) {
                const int row = i >> 1 & 1;
                float ds = p[f][i] * (dp[f][i] - dpsum[f][row]);
                if constexpr (C.softcap) {
                    // The capped score, relative to the cap, is found again from its weight; 1 - its square is the cap's slope.
                    const float ratio = (log2_approx(p[f][i]) + lse[f][row]) * (kLn2 / params.softcap);
                    ds = p[f][i] > 0.f ? ds * fmaf(-ratio, ratio, 1.f) : 0.f;
                }
                dp[f][i] = ds;
            }
        }
    }

    // Rounds a warp's share of P or dS and stores it: eight rows of four words at a time, which the swizzle spreads over all banks.
    __device__ __forceinline__ void store(u32 address, const typename CutS::Accumulators& x, int block) const {
        const Place place(block);
        using Tile = typename L::Pds;
        const int row = CutS::first_m(place.warp) + place.lane / 4;
        const u32 to = address + row * Tile::kRowBytes + place.lane % 4 * 4;
#pragma unroll
        for (int i = 0; i < CutS::kRegisters; i += 4) {
            const int column = CutS::first_n(place.warp) + 2 * i;
            const u32 at = to + Tile::panel_offset(column) + ((Tile::chunk(column) ^ Tile::twist(row)) << 4);
#pragma unroll
            for (int f = 0; f < CutS::kFragments; ++f) {
                store_shared_u32(at + 16 * f * Tile::kRowBytes, pack<C.dtype>(x[f][i], x[f][i + 1]));
                store_shared_u32(at + (16 * f + 8) * Tile::kRowBytes, pack<C.dtype>(x[f][i + 2], x[f][i + 3]));
            }
        }
    }

    __device__ __forceinline__ void add_dq(const typename CutDq::Accumulators& dq, int head, int block) const {
        if constexpr (C.deterministic) {
            if (threadIdx.x == 0) wait_for_turn<C.mask, C.tile_m, C.tile_n>(params, tile, head, block, 1);
            __syncthreads();
        }
        const i64 index = (i64(tile.batch) * params.heads_q + head) * params.m_blocks + block;
        const Place place(block);
        CutDq::add(params.dq_accum + index * (C.tile_m * C.head_dim), dq, place.warp, place.lane);
        if constexpr (C.deterministic) {
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) pass_turn(params, tile, head, block);
        }
    }

    // D += A B, cut among the warps.
    template <class Cut, class A, class B, int Contraction, int AheadA, int AheadB>
    __device__ __forceinline__ static void multiply(typename Cut::Accumulators& d, u32 a, u32 b, int block) {
        const Place place(block);
        warp_multiply<C.dtype, Contraction / 16, AheadA, AheadB>(d, A(Cut::first_m(place.warp), place.lane), a, B(Cut::first_n(place.warp), place.lane), b);
    }

    __device__ __forceinline__ void step(int head, int block) {
        // This tile is in; and, past the barrier, all that the step before this one read is free again.
        cp_async_wait<0>();
        __syncthreads();
        const bool same_head = block + 1 < range.end;
        const int next_head = same_head ? head : head + 1, next_block = same_head ? block + 1 : range.begin;
        const bool more = next_head < tile.end_head;
        if (more) {
            if constexpr (C.q_stages > 1) load_q(next_head, next_block, stage ^ 1);
            if constexpr (C.do_stages > 1) load_do(next_head, next_block, stage ^ 1);
        }
        cp_async_commit();

        const u32 q = q_buffer(stage), dout = do_buffer(stage);
        {
            typename CutS::Accumulators s, dp;
            float lse[CutS::kFragments][2], dpsum[CutS::kFragments][2];
            read_stats(lse, params.lse_log2, head, block);
            CutS::clear(s);
            multiply<CutS, typename L::QOfS, typename L::KOfS, C.head_dim, 1, 2>(s, q, smem_address(smem.k), block);
            read_stats(dpsum, params.dpsum, head, block);
            weigh(s, lse, block);
            CutS::clear(dp);
            multiply<CutS, typename L::DoOfDp, typename L::VOfDp, C.head_dim_v, 0, 1>(dp, dout, smem_address(smem.v), block);
            differentiate(s, dp, lse, dpsum);
            store(smem_address(smem.p), s, block);
            store(smem_address(smem.ds), dp, block);
        }
        __syncthreads();

        multiply<CutDv, typename L::POfDv, typename L::DoOfDv, C.tile_m, 1, 2>(dv, smem_address(smem.p), dout, block + 1);
        multiply<CutDk, typename L::DsOfDk, typename L::QOfDk, C.tile_m, 1, 2>(dk, smem_address(smem.ds), q, block + 1);
        if constexpr (C.q_stages == 1 || C.do_stages == 1) {
            // dQ needs neither Q nor dO.
            __syncthreads();
            if (more) {
                if constexpr (C.q_stages == 1) load_q(next_head, next_block, 0);
                if constexpr (C.do_stages == 1) load_do(next_head, next_block, 0);
            }
            cp_async_commit();
        }
        typename CutDq::Accumulators dq;
        CutDq::clear(dq);
        multiply<CutDq, typename L::DsOfDq, typename L::KOfDq, C.tile_n, 1, 2>(dq, smem_address(smem.ds), smem_address(smem.k), block + 1);
        add_dq(dq, head, block);
        stage ^= 1;
    }

    // The walk over the query heads and the tiles of queries; there is at least one of each.
    __device__ __forceinline__ void walk() {
        CutDk::clear(dk);
        CutDv::clear(dv);
        const int key = tile.n_block * C.tile_n;
        load<typename L::K>(smem_address(smem.k), params.k, params.k_strides, tile.batch, tile.kv_head, key, params.seqlen_k, params.head_dim);
        load<typename L::V>(smem_address(smem.v), params.v, params.v_strides, tile.batch, tile.kv_head, key, params.seqlen_k,
                            params.head_dim_v);
        load_q(tile.first_head, range.begin, 0);
        load_do(tile.first_head, range.begin, 0);
        cp_async_commit();
        for (int head = tile.first_head; head < tile.end_head; ++head) {
            for (int block = range.begin; block < range.end; ++block) step(head, block);
        }
    }

    // ---- dK and dV ----

    template <class Cut>
    __device__ __forceinline__ void store_gradient(const typename Cut::Accumulators& d, void* gradient, const RowStrides& strides, int columns,
                                                   float factor) const {
        const Place place;
        const int first = tile.n_block * C.tile_n;
        u16* out = static_cast<u16*>(gradient) + tile.batch * strides.batch + first * strides.seq + tile.kv_head * strides.head;
#pragma unroll
        for (int f = 0; f < Cut::kFragments; ++f) {
            const int row = Cut::first_m(place.warp) + 16 * f + place.lane / 4;
            const int left = params.seqlen_k - first;
            store_fragment_row<C.dtype, 0>(out + row * strides.seq, row < left, d[f], factor, Cut::first_n(place.warp), columns);
            store_fragment_row<C.dtype, 1>(out + (row + 8) * strides.seq, row + 8 < left, d[f], factor, Cut::first_n(place.warp), columns);
        }
    }

    __device__ __forceinline__ void finish() const {
        const Place place;
        if (params.head_splits > 1) {
            const i64 index = (i64(tile.batch) * params.heads_kv + tile.kv_head) * params.n_blocks + tile.n_block;
            CutDk::add(params.dk_accum + index * (C.tile_n * C.head_dim), dk, place.warp, place.lane);
            CutDv::add(params.dv_accum + index * (C.tile_n * C.head_dim_v), dv, place.warp, place.lane);
            return;
        }
        store_gradient<CutDk>(dk, params.dk, params.dk_strides, params.head_dim, params.scale);
        store_gradient<CutDv>(dv, params.dv, params.dv_strides, params.head_dim_v, 1.f);
    }
};

}  // namespace fa::sm80

// ---- Kernel -----------------------------------------------------------------------------------------------------------

namespace fa {

template <Sm80BwdConfig C>
constexpr int sm80_bwd_smem_bytes = sizeof(sm80::BwdStorage<C>);

template <Sm80BwdConfig C>
__device__ __forceinline__ void sm80_bwd(const BwdParams& params) {
    extern __shared__ __align__(128) u8 dynamic_smem[];
    auto& smem = *reinterpret_cast<sm80::BwdStorage<C>*>(dynamic_smem);
    if (threadIdx.x == 0) {
        // Deterministic tiles are drawn: those that one may wait for have been drawn before it and are running.
        const int index = C.deterministic ? atomicAdd(params.tile_counter, 1u) : blockIdx.x;
        smem.tile = bwd_tile_at<C.mask, C.tile_order, C.deterministic>(params, index);
        smem.range = query_range<C.mask, C.tile_m, C.tile_n>(params, smem.tile.n_block * C.tile_n);
    }
    __syncthreads();
    if (smem.range.empty() || smem.tile.first_head >= smem.tile.end_head) {
        store_no_gradient(params, smem.tile, C.tile_n);
        return;
    }
    sm80::BwdWalk<C> walk{smem, params};
    walk.walk();
    walk.finish();
}

}  // namespace fa
