// The consumers of the SM90 backward: each warpgroup computes its part of the five products of a step.
#pragma once
#include "attn/ahead_copies.cuh"
#include "attn/alibi.cuh"
#include "attn/block_list.cuh"
#include "attn/bwd_tile.cuh"
#include "attn/mask.cuh"
#include "attn/mask_bits.cuh"
#include "attn/programs.cuh"
#include "attn/query_range.cuh"
#include "attn/score_mod.cuh"
#include "attn/store_rows.cuh"
#include "attn/tensor_view.cuh"
#include "attn/visibility.cuh"
#include "bwd_params.cuh"
#include "config.cuh"
#include "ptx/address.cuh"
#include "ptx/atomic.cuh"
#include "ptx/bulk.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/special.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/bwd_dq.cuh"
#include "sm90/bwd_layout.cuh"
#include "tile/pipeline.cuh"
#include "tile/store_fragment.cuh"

namespace fa::sm90 {

// A consumer's positions in the rings, kept from tile to tile.
template <Sm90BwdConfig C>
struct BwdPlaces {
    PipelineState<C.q_stages> q;
    PipelineState<C.do_stages> dout;
    int pds_stage = 0;
    u32 keys_phase = 0;
};

// The scores of a thread in block `b` of a warpgroup's part of a tile of S, as programs see them.
template <Sm90BwdConfig C>
__device__ __forceinline__ ScorePlace<C.sdp_swap_ab> bwd_place(const ShapeParams& shape,
                                                               const Seqlen<C.varied>& seqlen, int batch,
                                                               int head, int m_block, int n_block, int b,
                                                               int wg, int warp, int lane) {
    using Cut = typename BwdTraits<C>::CutS;
    const int row = Cut::first_m(wg) + 64 * b + 16 * warp + lane / 4;
    const int column = Cut::first_n(wg) + 2 * (lane % 4);
    const int query = m_block * C.tile_m + (C.sdp_swap_ab ? column : row);
    const int key = n_block * C.tile_n + (C.sdp_swap_ab ? row : column);
    const int queries = seqlen.q(), keys = seqlen.k();
    return {batch, queries, keys, keys - queries, shape.group_size, {head, head}, {query, query + 8}, key};
}

// The bits of a program's mask that a consumer's thread reads.
template <Sm90BwdConfig C>
using BwdMaskBits = MaskBits<BwdTraits<C>::S::kRegisters, BwdTraits<C>::S::kBlocks, BwdTraits<C>::kConsumers>;

// The bits of the tiles of queries that tiles of keys visit.
template <Sm90BwdConfig C>
__device__ __forceinline__ void keep_mask_bits(const BwdParams& params) {
    constexpr int kBlocks = BwdTraits<C>::S::kBlocks;
    const BlockMapParams& map = map_of(params);
    const int warp = thread_index() / 32, lane = lane_index();
    auto place_of = [&](int batch, int head, int n_block, int m_block, int b) {
        return bwd_place<C>(params.shape, Seqlen<C.varied>::of(params, batch), batch, head, m_block, n_block,
                            b, warp / 4, warp % 4, lane);
    };
    fa::keep_mask_bits<BwdMaskBits<C>, kBlocks, mask_tile_words<C>(), false>(programs_of(params), map,
                                                                             map.columns, map.rows, place_of);
}

// A consumer warpgroup: its accumulators, and its part of a step's products.
template <Sm90BwdConfig C>
struct BwdConsumer {
    using T = BwdTraits<C>;
    using S = typename T::S;
    using Dp = typename T::Dp;
    using Dk = typename T::Dk;
    using Dv = typename T::Dv;
    using Dq = typename T::Dq;
    using MaskWords = BwdMaskBits<C>;
    static constexpr int kWords = S::kRegisters / 2;  // registers of P or dS, packed, per block of 64 rows

    BwdStorage<C>& smem;
    const BwdParams& params;
    const Visibility<C.mask, C.varied>& visible;
    const Tile<C>& tile;
    const BlockRange& range;
    const int walk;
    const int wg, warp, lane;
    const bool elected;
    const TensorMap* const map_ds;  // of the array whose gradient is dS

    BwdPlaces<C> places;
    bool accumulate = false;
    MaskWords bits;
    BlockEntry next_entry;  // of the list of a program's mask: that of the next step

    float s[S::kBlocks][S::kRegisters];
    float dp[S::kBlocks][S::kRegisters];
    float dk[Dk::kBlocks][Dk::kRegisters];
    float dv[Dv::kBlocks][Dv::kRegisters];
    u32 p_words[S::kBlocks][kWords];
    u32 ds_words[S::kBlocks][kWords];

    [[no_unique_address]] AheadState<typename T::Copies, S::kBlocks> ahead;

    // Issues D = First Second^T, or its transpose with Swap, as one wgmma group.
    template <class P, bool Swap, int Begin = 0, int Count>
    __device__ __forceinline__ void issue(float (&d)[Count][P::kRegisters], const Descriptor& first,
                                          const Descriptor& second, bool add) {
        wgmma::fence();
        P::template issue<Begin, Count>(d, Swap ? second : first, Swap ? first : second, add);
        wgmma::commit();
    }

    __device__ __forceinline__ int row_of_s() const { return T::CutS::first_m(wg); }
    __device__ __forceinline__ int column_of_s() const { return T::CutS::first_n(wg); }

    __device__ __forceinline__ void issue_s() {
        const u32 q = smem_address(smem.q[0]) + places.q.stage * T::Q::kBytes;
        issue<S, C.sdp_swap_ab>(
            s, T::QRows::descriptor(q, C.sdp_swap_ab ? column_of_s() : row_of_s()),
            T::KRows::descriptor(smem_address(smem.k), C.sdp_swap_ab ? row_of_s() : column_of_s()), false);
    }
    __device__ __forceinline__ void issue_dp() {
        const u32 dout = smem_address(smem.dout[0]) + places.dout.stage * T::Do::kBytes;
        issue<Dp, C.sdp_swap_ab>(
            dp, T::DoRows::descriptor(dout, C.sdp_swap_ab ? column_of_s() : row_of_s()),
            T::VRows::descriptor(smem_address(smem.v), C.sdp_swap_ab ? row_of_s() : column_of_s()), false);
    }
    // Issues dV += P^T dO; issue_dk() issues dK += dS^T Q.
    __device__ __forceinline__ void issue_dv() {
        const int m = T::CutDv::first_m(wg), n = T::CutDv::first_n(wg);
        const u32 dout = smem_address(smem.dout[0]) + places.dout.stage * T::Do::kBytes;
        const Descriptor second = T::DoColumns::descriptor(dout, C.dkv_swap_ab ? m : n);
        if constexpr (C.mma_dkv_is_rs) {
            wgmma::fence();
            Dv::issue_rs(dv, p_words, second, accumulate);
            wgmma::commit();
        } else {
            const u32 p = smem_address(smem.p.tiles[0]) + places.pds_stage * T::Pds::kBytes;
            issue<Dv, C.dkv_swap_ab>(dv, T::PdsByKeys::descriptor(p, C.dkv_swap_ab ? n : m), second,
                                     accumulate);
        }
    }
    __device__ __forceinline__ void issue_dk() {
        const int m = T::CutDk::first_m(wg), n = T::CutDk::first_n(wg);
        const u32 q = smem_address(smem.q[0]) + places.q.stage * T::Q::kBytes;
        const Descriptor second = T::QColumns::descriptor(q, C.dkv_swap_ab ? m : n);
        if constexpr (C.mma_dkv_is_rs) {
            wgmma::fence();
            Dk::issue_rs(dk, ds_words, second, accumulate);
            wgmma::commit();
        } else {
            const u32 ds = smem_address(smem.ds[0]) + places.pds_stage * T::Pds::kBytes;
            issue<Dk, C.dkv_swap_ab>(dk, T::PdsByKeys::descriptor(ds, C.dkv_swap_ab ? n : m), second,
                                     accumulate);
        }
    }
    // Issues one slice of dQ = dS K.
    template <int Slice>
    __device__ __forceinline__ void issue_dq(float (&dq)[T::kDqBlocks][Dq::kRegisters]) {
        const int m = T::CutDq::first_m(wg), n = T::CutDq::first_n(wg);
        const u32 ds = smem_address(smem.ds[0]) + places.pds_stage * T::Pds::kBytes;
        issue<Dq, C.dq_swap_ab, Slice * T::kDqBlocks>(
            dq, T::PdsByQueries::descriptor(ds, C.dq_swap_ab ? n : m),
            T::KColumns::descriptor(smem_address(smem.k), C.dq_swap_ab ? m : n), false);
    }

    __device__ __forceinline__ void release_q() {
        smem.q_bars.release(places.q, elected);
        places.q.advance();
    }
    // Every thread signals its own reads of the statistics, which TMA overwrites next. One thread per warp
    // would suffice, as a named barrier follows the reads, but compute-sanitizer's racecheck does not connect
    // the two kinds of barriers.
    __device__ __forceinline__ void release_do() {
        smem.do_bars.release(places.dout, true);
        places.dout.advance();
    }

    // Loads the statistics of the queries of registers 4i to 4i + 3 of block `b`.
    __device__ __forceinline__ void load_stats(const float* stats, int b, int i, float (&of)[4]) const {
        if constexpr (C.sdp_swap_ab) {
            const float2 pair =
                *reinterpret_cast<const float2*>(stats + column_of_s() + 2 * (lane % 4) + 8 * i);
            of[0] = of[2] = pair.x;
            of[1] = of[3] = pair.y;
        } else {
            const float* row = stats + row_of_s() + 64 * b + 16 * warp + lane / 4;
            of[0] = of[1] = row[0];
            of[2] = of[3] = row[8];
        }
    }

    // Turns the scores of block `b` of a tile of queries into exponents biased by ALiBi, in place.
    __device__ __forceinline__ void add_bias(float (&scores)[S::kRegisters], int b, int m_block,
                                             float to_log2, float slope) const {
        const int row = row_of_s() + 64 * b + 16 * warp + lane / 4;
        const int column = column_of_s() + 2 * (lane % 4);
        const int first_query = m_block * C.tile_m + visible.seqlen.k() - visible.seqlen.q();
        const int first_key = tile.n_block * C.tile_n;
        if constexpr (C.sdp_swap_ab) {
            add_alibi_transposed<C.mask>(scores, to_log2, slope, first_query + column, first_key + row);
        } else {
            add_alibi<C.mask>(scores, to_log2, {slope, slope}, {first_query + row, first_query + row + 8},
                              first_key + column);
        }
    }

    // Block `b` of a tile of S, as programs see it.
    __device__ __forceinline__ ScorePlace<C.sdp_swap_ab> place_of(int b, int head, int m_block) const {
        return bwd_place<C>(params.shape, visible.seqlen, tile.batch, head, m_block, tile.n_block, b, wg,
                            warp, lane);
    }

    // Where what the warp copies for block `b` lies.
    __device__ __forceinline__ u32 copied(int b) const {
        return smem_address(smem.ahead.parts[S::kBlocks * (4 * wg + warp) + b]);
    }
    // Starts to copy what the program reads for a tile of queries.
    __device__ __forceinline__ void copy_ahead(int head, int m_block) {
        constexpr bool kSwap = C.sdp_swap_ab;
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b) {
            const auto place = place_of(b, head, m_block);
            const auto mods = place.mods(programs_of(params), 0);
            const int first_query = place.query[0] - (kSwap ? lane % 4 * 2 : lane / 4);
            const int first_key = place.key - (kSwap ? lane / 4 : lane % 4 * 2);
            auto offset_of = [&](int r) { return mods.ahead_offset(mods.row(first_query + r)); };
            ahead.copies[b].start(copied(b), mods, first_key, visible.seqlen.k(), offset_of);
        }
    }
    // Turns products of block `b` into exponents by the program.
    template <class Place>
    __device__ __forceinline__ void make_exponents(int b, const Place& place) {
        if constexpr (copies_ahead()) {
            to_exponents(s[b], params, params.score, place, ahead.copies[b], copied(b));
        } else {
            to_exponents(s[b], params, params.score, place);
        }
    }

    // Turns products into probabilities P of a tile of queries, in place, but for the keys that `bits`
    // hide. `slope` is ALiBi's, in exponents of 2. Where a program has a slope, P goes to
    // p_words, and its product with the slope stays.
    __device__ __forceinline__ void to_probabilities(int head, int m_block, float slope) {
        const ScoreMod<C.softcap> score_mod{params.score};
        if constexpr (kScoreSlope) return to_sloped_probabilities(head, m_block);
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b) {
            score_mod.apply(s[b]);
            if constexpr (C.alibi) add_bias(s[b], b, m_block, score_mod.to_log2(), slope);
            if constexpr (kScoreProgram) make_exponents(b, place_of(b, head, m_block));
            if constexpr (kMaskProgram) bits.hide(s[b], b, programs_of(params), place_of(b, head, m_block));
        }
        mask_band(m_block);
        const float scale_log2 = C.alibi || kScoreProgram ? 1.f : score_mod.to_log2();
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
            for (int i = 0; i < S::kRegisters / 4; ++i) {
                float lse[4];
                load_stats(smem.lse[places.dout.stage], b, i, lse);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float& x = s[b][4 * i + j];
                    if constexpr (kScoreProgram && never_hides()) {
                        // Rows past the end have finite exponents: no product of zeros is another number.
                        x = exp2_approx(min_or_nan(x - lse[j], 0.f));
                    } else if constexpr (kScoreProgram) {
                        x = probability(x, lse[j]);
                    } else {
                        x = exp2_approx(fmaf(x, scale_log2, -lse[j]));
                    }
                }
            }
        }
    }

    // Hides what the band hides.
    __device__ __forceinline__ void mask_band(int m_block) {
        if (range.needs_mask(m_block)) {
            const int first_query = m_block * C.tile_m, first_key = tile.n_block * C.tile_n;
#pragma unroll
            for (int b = 0; b < S::kBlocks; ++b) {
                const int row = row_of_s() + 64 * b + 16 * warp + lane / 4;
                const int column = column_of_s() + 2 * (lane % 4);
                if constexpr (C.sdp_swap_ab) {
                    mask_tile_transposed<C.tile_m>(s[b], visible, first_key + row, first_query + column);
                } else {
                    auto query_of = [&](int r) { return first_query + row + 8 * r; };
                    mask_tile(s[b], visible, query_of, first_key + column);
                }
            }
        }
    }

    // The same with a program that has a slope.
    __device__ __forceinline__ void to_sloped_probabilities(int head, int m_block) {
        float slopes[S::kBlocks][S::kRegisters];
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b) {
            const auto place = place_of(b, head, m_block);
            slopes_of(slopes[b], s[b], params, place);
            make_exponents(b, place);
            if constexpr (kMaskProgram) bits.hide(s[b], b, programs_of(params), place);
        }
        mask_band(m_block);
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
            for (int i = 0; i < S::kRegisters / 4; ++i) {
                float lse[4];
                load_stats(smem.lse[places.dout.stage], b, i, lse);
#pragma unroll
                for (int j = 0; j < 4; ++j) s[b][4 * i + j] = probability(s[b][4 * i + j], lse[j]);
            }
        }
        pack_p(head, m_block);
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
            for (int i = 0; i < S::kRegisters; ++i) s[b][i] = sloped(s[b][i], slopes[b][i]);
        }
    }

    // Computes dS = P (dP - dPsum), overwriting dP.
    __device__ __forceinline__ void differentiate(int head, int m_block, bool masks, float slope) {
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b) {
            if constexpr (weighs()) weigh(dp[b], params, place_of(b, head, m_block));
            // P includes ALiBi's bias, which must be known to recover the capped score from it.
            float bias[S::kRegisters] = {};
            if constexpr (C.softcap && C.alibi) add_bias(bias, b, m_block, 0.f, slope);
#pragma unroll
            for (int i = 0; i < S::kRegisters / 4; ++i) {
                float dpsum[4], lse[4];
                load_stats(smem.dpsum[places.dout.stage], b, i, dpsum);
                if constexpr (C.softcap) load_stats(smem.lse[places.dout.stage], b, i, lse);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float p = s[b][4 * i + j];
                    float ds = p * (dp[b][4 * i + j] - dpsum[j]);
                    if constexpr (kScoreProgram && !never_hides()) ds = p == 0.f ? 0.f : ds;
                    if constexpr (C.softcap) {
                        const float capped = C.alibi ? lse[j] - bias[4 * i + j] : lse[j];
                        const float factor = ScoreMod<C.softcap>{params.score}.slope(p, capped);
                        ds = p > 0.f ? ds * factor : 0.f;
                    }
                    dp[b][4 * i + j] = ds;
                }
            }
            // A key that no program's change of scores hides is hidden in tiles that the mask parts alone.
            if constexpr (kMaskProgram && (!kScoreProgram || never_hides())) {
                if (masks) {
#pragma unroll
                    for (int i = 0; i < S::kRegisters; ++i) dp[b][i] = s[b][i] == 0.f ? 0.f : dp[b][i];
                }
            }
        }
    }

    // Packs P, with the program's weights, for dV.
    __device__ __forceinline__ void pack_p(int head, int m_block) {
        if constexpr (weighs()) {
            float weighed[S::kBlocks][S::kRegisters];
#pragma unroll
            for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
                for (int i = 0; i < S::kRegisters; ++i) weighed[b][i] = s[b][i];
                weigh(weighed[b], params, place_of(b, head, m_block));
            }
            pack_words(p_words, weighed);
        } else {
            pack_words(p_words, s);
        }
    }

    __device__ __forceinline__ static void pack_words(u32 (&words)[S::kBlocks][kWords],
                                                      const float (&x)[S::kBlocks][S::kRegisters]) {
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
            for (int i = 0; i < kWords; ++i) words[b][i] = pack<C.dtype>(x[b][2 * i], x[b][2 * i + 1]);
        }
    }
    __device__ __forceinline__ void store_words(u32 address, const u32 (&words)[S::kBlocks][kWords]) const {
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b) {
            store_fragment<typename T::Pds, T::kPdsTransposed>(address + places.pds_stage * T::Pds::kBytes,
                                                               words[b], row_of_s() + 64 * b + 16 * warp,
                                                               column_of_s(), lane);
        }
    }
    // Waits until all consumers have stored P and dS of this step, and have read those of the previous step.
    __device__ __forceinline__ void exchange() {
        fence_async_shared();
        named_barrier_sync(kPdsReady, T::kConsumers);
    }
    // Whether the thread stores dS for the CTA, in a call that takes an array's gradient from it.
    __device__ __forceinline__ bool stores_ds() const {
        return elected && wg == 0 && warp == 0 && stored_of(params).is_stored != 0;
    }
    // Starts to store the dS that all consumers have exchanged.
    __device__ __forceinline__ void store_ds(int head, int m_block) const {
        if constexpr (stores_scores_gradient()) {
            if (!stores_ds()) return;
            const u32 ds = smem_address(smem.ds[0]) + places.pds_stage * T::Pds::kBytes;
            const int first_key = tile.n_block * C.tile_n;
#pragma unroll
            for (int i = 0; i < T::Pds::kPanels; ++i) {
                tma_store_4d(*map_ds, ds + i * T::Pds::kPanelBytes, first_key + i * T::Pds::kPanel,
                             m_block * C.tile_m, head, tile.batch, L2Policy::EvictFirst);
            }
            bulk_commit();
        }
    }
    // Waits until the dS of earlier steps has been read; the next barrier says it to the others.
    __device__ __forceinline__ void wait_ds_stored() const {
        if constexpr (stores_scores_gradient()) {
            if (stores_ds()) bulk_wait_read();
        }
    }
    __device__ __forceinline__ void wait_pds_free() {
        wait_ds_stored();
        // With two buffers the previous step's exchange ensures the latter.
        if constexpr (C.pds_stages == 1) named_barrier_sync(kPdsFree, T::kConsumers);
    }

    // Waits until the dQ buffer may be written again; without a buffer, for the turn to add.
    __device__ __forceinline__ void wait_dq_free() const { named_barrier_sync(kDqFree + wg, 128 + 32); }
    // Signals the dQ warp that the buffer is full.
    __device__ __forceinline__ void announce_dq() const {
        fence_async_shared();
        named_barrier_arrive(kDqReady + wg, 128 + 32);
    }

    // Stores a slice of dQ, which has no other sums: all keys are the tile's.
    template <int Slice>
    __device__ __forceinline__ void store_dq(const float (&dq)[T::kDqBlocks][Dq::kRegisters], int head,
                                             int m_block) {
        const int queries = visible.seqlen.q();
        const int first = m_block * C.tile_m + T::CutDq::first_m(wg) + 16 * warp + lane / 4;
#pragma unroll
        for (int b = 0; b < T::kDqBlocks; ++b) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int query = first + 64 * (Slice * T::kDqBlocks + b) + 8 * r;
                u16* const out = view(params.dq).row(tile.batch, visible.seqlen.q_offset() + query, head);
                store_fragment_row<C.dtype>(r, out, query < queries, dq[b], params.score.scale,
                                            T::CutDq::first_n(wg), params.shape.head_dim);
            }
        }
    }

    // Adds a slice of dQ: through the buffer and the dQ warp, or directly to global memory.
    template <int Slice>
    __device__ __forceinline__ void add_dq(const float (&dq)[T::kDqBlocks][Dq::kRegisters], int head,
                                           int m_block) {
        const int thread = thread_index() % 128;
        constexpr int kGroups = Dq::kRegisters / 4;
        if constexpr (C.dq_via_smem) {
            if (!T::kDqAhead || Slice > 0) wait_dq_free();
            float4* share =
                reinterpret_cast<float4*>(smem.dq.tiles[0] + wg * T::DqOrder::kShare * 4) + thread;
#pragma unroll
            for (int b = 0; b < T::kDqBlocks; ++b) {
#pragma unroll
                for (int i = 0; i < kGroups; ++i) {
                    share[(b * kGroups + i) * 128] =
                        make_float4(dq[b][4 * i], dq[b][4 * i + 1], dq[b][4 * i + 2], dq[b][4 * i + 3]);
                }
            }
            if (!T::kDqAhead || Slice < C.dq_slices - 1) announce_dq();
        } else if constexpr (C.whole_keys) {
            store_dq<Slice>(dq, head, m_block);
        } else {
            if (C.deterministic && Slice == 0) wait_dq_free();
            float* share = dq_share<C>(params, tile, head, m_block, Slice, wg) + thread * 4;
#pragma unroll
            for (int b = 0; b < T::kDqBlocks; ++b) {
#pragma unroll
                for (int i = 0; i < kGroups; ++i) {
                    red_add_f32x4(share + (b * kGroups + i) * 512, dq[b][4 * i], dq[b][4 * i + 1],
                                  dq[b][4 * i + 2], dq[b][4 * i + 3]);
                }
            }
            if (C.deterministic && Slice == C.dq_slices - 1) named_barrier_arrive(kDqReady + wg, 128 + 32);
        }
    }

    // Reads what the mask's program leaves of the tile of queries at a place of the list.
    __device__ __forceinline__ void read_bits(const Blocks& blocks, int place, BlockEntry entry) {
        if constexpr (kMaskProgram) {
            const BlockMapParams& map = map_of(params);
            bits.read(map, blocks.words(), map.rows, place, entry.full(), thread_index() - 128);
        }
    }

    // One step of the mainloop, a tile of queries. P and dS are ready before dV is issued.
    // The bits of the tile of queries at `next` are read for the next step.
    __device__ __forceinline__ void step(const Blocks& blocks, int head, int m_block, int next, float slope) {
        // Before the waits, under which the load is hidden.
        if constexpr (kMaskProgram) next_entry = blocks.entry_here(next);
        smem.q_bars.wait_full(places.q);
        issue_s();
        smem.do_bars.wait_full(places.dout);
        issue_dp();
        if (T::kDqAhead && accumulate) announce_dq();
        wgmma::wait<1>();
        to_probabilities(head, m_block, slope);
        const bool masks = kMaskProgram && bits.masks;
        read_bits(blocks, next, next_entry);
        if constexpr (copies_ahead()) {
            const int own = kMaskProgram ? next_entry.block() : next;
            if (ahead.head < tile.end_head) copy_ahead(ahead.head, own);
        }
        wgmma::wait<0>();
        differentiate(head, m_block, masks, slope);
        if constexpr (!kScoreSlope) pack_p(head, m_block);
        pack_words(ds_words, dp);
        wait_pds_free();
        if constexpr (C.mma_dkv_is_rs) {
            if constexpr (!T::kStoreFirst) issue_dv();
        } else {
            store_words(smem_address(smem.p.tiles[0]), p_words);
        }
        store_words(smem_address(smem.ds[0]), ds_words);
        if constexpr (T::kStoreFirst) issue_dv();
        exchange();
        store_ds(head, m_block);
        if constexpr (!C.mma_dkv_is_rs) issue_dv();
        // By now dV is almost done; the registers of its operand P are reused for dQ.
        wgmma::wait<0>();
        release_do();
        if constexpr (T::kDqAhead) wait_dq_free();
        float dq[T::kDqBlocks][Dq::kRegisters];
        issue_dq<0>(dq);
        issue_dk();
        wgmma::wait<1>();
        add_dq<0>(dq, head, m_block);
        if constexpr (C.dq_slices > 1) {
            issue_dq<1>(dq);
            wgmma::wait<0>();
            add_dq<1>(dq, head, m_block);
        }
        wgmma::wait<0>();
        release_q();
        accumulate = true;
        places.pds_stage = C.pds_stages > 1 ? places.pds_stage ^ 1 : 0;
    }

    // The mainloop over the tile's query heads and tiles of queries.
    __device__ __forceinline__ void main_loop() {
        if constexpr (copies_ahead()) {
            const Blocks own =
                query_list<mask_tile_words<C>()>(params, tile.batch, tile.kv_head, tile.n_block);
            copy_ahead(tile.first_head, own.at(query_block<C>(range, walk, range.begin)));
        }
        mbarrier_wait(smem.k_full, places.keys_phase);
        mbarrier_wait(smem.v_full, places.keys_phase);
        const Blocks blocks =
            query_list<mask_tile_words<C>()>(params, tile.batch, tile.kv_head, tile.n_block);
        if constexpr (kMaskProgram) {
            if (range.begin < range.end) {
                const int place = query_block<C>(range, walk, range.begin);
                next_entry = blocks.entry(place);
                read_bits(blocks, place, next_entry);
            }
        }
        for (int head = tile.first_head; head < tile.end_head; ++head) {
            float slope = 0.f;
            if constexpr (C.alibi) slope = alibi_slope<C.mask>(params.mods, tile.batch, head, kLog2e);
            for (int i = range.begin; i < range.end; ++i) {
                const int next = i + 1 < range.end ? i + 1 : range.begin;
                if constexpr (copies_ahead()) ahead.head = i + 1 < range.end ? head : head + 1;
                int m_block = query_block<C>(range, walk, i);
                if constexpr (kMaskProgram) m_block = next_entry.block();
                step(blocks, head, m_block, query_block<C>(range, walk, next), slope);
            }
        }
        if (T::kDqAhead && accumulate) announce_dq();
        if constexpr (C.persistent) {
            if (elected) {
                mbarrier_arrive(smem.draws.k_empty);
                mbarrier_arrive(smem.draws.v_empty);
            }
            places.keys_phase ^= 1;
        }
    }

    // Stores dK or dV through a tile of shared memory that is free by now: neighbouring threads write 16
    // bytes each of one row.
    template <class Cut, class Tile, int Blocks, int Registers>
    __device__ __forceinline__ void store_through(u8* buffer, const float (&d)[Blocks][Registers], u16* out,
                                                  i64 stride, int columns, float factor) const {
        // With a soft cap registers are scarcest: the lane is recomputed here, not kept through the mainloop.
        const int store_lane = C.softcap ? thread_index_volatile() % 32 : lane;
#pragma unroll
        for (int b = 0; b < Blocks; ++b) {
            u32 words[Registers / 2];
#pragma unroll
            for (int i = 0; i < Registers / 2; ++i)
                words[i] = pack<C.dtype>(d[b][2 * i] * factor, d[b][2 * i + 1] * factor);
            store_fragment<Tile, C.dkv_swap_ab>(smem_address(buffer), words,
                                                Cut::first_m(wg) + 64 * b + 16 * warp, Cut::first_n(wg),
                                                store_lane);
        }
        named_barrier_sync(kPdsReady, T::kConsumers);
        const int left = visible.seqlen.k() - tile.n_block * C.tile_n;
        constexpr int kChunks = Tile::kPanels * Tile::kPanel / 8;
#pragma unroll 4
        for (int chunk = thread_index() - 128; chunk < C.tile_n * kChunks; chunk += T::kConsumers) {
            const int row = chunk / kChunks, column = chunk % kChunks * 8;
            const u32 at = column / Tile::kPanel * Tile::kPanelBytes +
                           swizzled<Tile::kRowBytes>(row * Tile::kRowBytes + column % Tile::kPanel * 2);
            if (row < left && column < columns)
                *reinterpret_cast<Vec16*>(out + row * stride + column) =
                    *reinterpret_cast<Vec16*>(buffer + at);
        }
    }

    template <class Order, int Blocks, int Registers>
    __device__ __forceinline__ void add_direct(const float (&d)[Blocks][Registers], float* accum) const {
        float* share = accum + wg * Order::kShare + thread_index() % 128 * 4;
#pragma unroll
        for (int b = 0; b < Blocks; ++b) {
#pragma unroll
            for (int i = 0; i < Registers / 4; ++i) {
                red_add_f32x4(share + (b * (Registers / 4) + i) * 512, d[b][4 * i], d[b][4 * i + 1],
                              d[b][4 * i + 2], d[b][4 * i + 3]);
            }
        }
    }

    // The tile with the position of its keys in the workspace, which only split heads need: the mainloop has
    // no registers to keep it in.
    __device__ __forceinline__ Tile<C> placed_tile() const {
        Tile<C> placed = tile;
        if constexpr (C.varied)
            placed.keys = WorkspacePlace::of_keys<C.tile_n>(params, visible.seqlen, tile.batch);
        return placed;
    }

    // Deterministic kernels with split heads: waits for the split's turn to add to dV (`of` = 0) or dK (`of`
    // = 1).
    __device__ __forceinline__ void await_turn(const Tile<C>& placed, int of) const {
        if constexpr (C.deterministic) {
            if (thread_index() == 128) wait_for_parts(dkv_semaphore(params, placed, of), tile.split);
            named_barrier_sync(kPdsReady, T::kConsumers);
        }
    }
    __device__ __forceinline__ void end_turn(const Tile<C>& placed, int of) const {
        if constexpr (C.deterministic) {
            named_barrier_sync(kPdsReady, T::kConsumers);
            if (thread_index() == 128) red_release_increment(dkv_semaphore(params, placed, of));
        }
    }

    __device__ __forceinline__ void finish() {
        wait_ds_stored();
        if (params.head_splits > 1) {
            const Tile<C> placed = placed_tile();
            const i64 index = dkv_tile(params, placed);
            await_turn(placed, 0);
            add_direct<typename T::DvOrder>(dv, params.dv_accum + index * (C.tile_n * C.head_dim_v));
            end_turn(placed, 0);
            await_turn(placed, 1);
            add_direct<typename T::DkOrder>(dk, params.dk_accum + index * (C.tile_n * C.head_dim));
            end_turn(placed, 1);
            return;
        }
        const int first = visible.seqlen.k_offset() + tile.n_block * C.tile_n;
        u16* out_k = view(params.dk).row(tile.batch, first, tile.kv_head);
        u16* out_v = view(params.dv).row(tile.batch, first, tile.kv_head);
        named_barrier_sync(kPdsReady, T::kConsumers);
        if constexpr (C.persistent) {
            // All warpgroups have read dS, whose buffer is free; K's and V's are being filled for the next
            // tile.
            constexpr bool kBoth = T::V::kBytes + T::K::kBytes <= C.pds_stages * T::Pds::kBytes;
            store_dv(smem.ds[0], out_v);
            if constexpr (!kBoth) named_barrier_sync(kPdsReady, T::kConsumers);
            store_dk(smem.ds[0] + (kBoth ? T::V::kBytes : 0), out_k);
            // The next work tile's dS may be written.
            named_barrier_sync(kPdsReady, T::kConsumers);
        } else {
            // All warpgroups have read K and V.
            store_dv(smem.v, out_v);
            store_dk(smem.k, out_k);
        }
    }
    __device__ __forceinline__ void store_dv(u8* room, u16* out) const {
        store_through<typename T::CutDv, typename T::V>(room, dv, out, params.dv.strides.seq,
                                                        params.shape.head_dim_v, 1.f);
    }
    __device__ __forceinline__ void store_dk(u8* room, u16* out) const {
        store_through<typename T::CutDk, typename T::K>(room, dk, out, params.dk.strides.seq,
                                                        params.shape.head_dim, params.score.scale);
    }
};

}  // namespace fa::sm90
