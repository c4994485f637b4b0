// The consumers of the SM90 forward of e4m3 tensors: each warpgroup computes 64 query rows over the keys that
// they see.
#pragma once
#include "attn/alibi.cuh"
#include "attn/block_range.cuh"
#include "attn/descales.cuh"
#include "attn/epilogue.cuh"
#include "attn/mask.cuh"
#include "attn/rows.cuh"
#include "attn/score_mod.cuh"
#include "attn/softmax.cuh"
#include "attn/split.cuh"
#include "attn/store_permuted.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/fp8_layout.cuh"
#include "sm90/fwd_tiles.cuh"
#include "tile/descriptor.cuh"
#include "tile/pipeline.cuh"

namespace fa::sm90 {

// Stores rows `row` and `row` + 8, if they are before `end`: O scaled by `factor`, and LSE.
template <Sm90FwdFp8Config C, int N>
__device__ __forceinline__ void store_output8(const FwdParams& params, const Seqlen<C.varied>& seqlen,
                                              const float (&o)[N], const float (&factor)[2],
                                              const float (&lse)[2], int row, int end, const WorkTile& tile) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const OutputRow<C.pack_gqa> target(params, seqlen, row + 8 * r, end, tile.head, tile.batch);
        store_permuted_row<C.out_dtype>(r, target.out, target.inside, o, factor[r], params.shape.head_dim_v);
        if (params.lse != nullptr && thread_index() % 4 == 0 && target.inside)
            params.lse[target.lse] = lse[r];
    }
}

// The same for a part of the keys: O in f32, in the order of its columns, and LSE. `own_row` is the thread's
// first row within its tile. Of 16 columns a lane of a quad has four next to each other.
template <int N>
__device__ __forceinline__ void store_partial8(const PartialRows& rows, int columns, const float (&o)[N],
                                               const float (&factor)[2], const float (&lse)[2], int row,
                                               int end, int own_row) {
    const int lane = thread_index() % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (row + 8 * r >= end) continue;
        float* out = rows.out + i64(own_row + 8 * r) * rows.stride + 4 * lane;
#pragma unroll
        for (int block = 0; block < N / 8; ++block) {
            const int i = 8 * block + 2 * r;
            if (16 * block < columns)
                *reinterpret_cast<float4*>(out + 16 * block) = {o[i] * factor[r], o[i + 4] * factor[r],
                                                                o[i + 1] * factor[r], o[i + 5] * factor[r]};
        }
        if (lane == 0) rows.lse[own_row + 8 * r] = lse[r];
    }
}

// O = O * rescale + products, for the columns of `Products` registers from `first` on.
template <int N, int Products>
__device__ __forceinline__ void add_products(float (&o)[N], const float (&products)[Products], int first,
                                             const float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < Products; ++i) o[first + i] = fmaf(o[first + i], rescale[i >> 1 & 1], products[i]);
}

// The factors of a work tile's scores: those of the launch times Q's and K's descales, which a soft cap takes
// before it caps.
__device__ __forceinline__ ScoreParams descaled_scores(const FwdParams& params, int batch, int kv_head) {
    const CacheParams& descales = cache_of(params);
    const float q = head_descale(descales.q, batch, kv_head), k = head_descale(descales.k, batch, kv_head);
    ScoreParams scores = params.score;
    scores.scale_log2 = TileScores<true>::at_least(scores.scale_log2 * q * k);
    scores.softcap_exponent = scores.softcap_exponent * q * k;
    return scores;
}

template <Sm90FwdFp8Config C>
__device__ __forceinline__ void consume8(Fp8Storage<C>& smem, const FwdParams& params, int wg) {
    using T = Fp8Traits<C>;
    constexpr int kEarly = max_of(8, C.tile_n / 2 / 4 / 8 * 8);
    const bool elected = elect_one();
    const int warp = warp_index() % 4;
    const int lane = lane_index();
    const int heads = C.pack_gqa ? params.shape.heads_kv : params.shape.heads_q;
    // The thread's first accumulator row within the work tile, and its first column within a tile of keys.
    const int own_row = 64 * wg + 16 * warp + lane / 4;
    const int own_column = 2 * (lane % 4);

    const Descriptor desc_q =
        descriptor_k_major<typename T::Q>(smem_address(smem.q[0]) + T::Q::row_offset(64 * wg));
    const Descriptor desc_k = descriptor_k_major<typename T::K>(smem_address(smem.k[0]));
    const Descriptor desc_v = descriptor_k_major<typename T::Vt>(smem_address(smem.vt[0]));

    PipelineState<C.q_stages> q_state;
    PipelineState<C.kv_stages> k_state, v_state;
    TileSource<C> tiles(params, cta_index(), heads);

    // Ping-pong: warpgroups issue products in turn. Warpgroup i waits at named barrier 1 + i, then signals
    // the next one.
    auto wait_turn = [&] {
        if constexpr (C.ping_pong) named_barrier_sync(1 + wg, 256);
    };
    auto signal_next = [&] {
        if constexpr (C.ping_pong) named_barrier_arrive(1 + (wg + 1 == C.num_wg ? 0 : wg + 1), 256);
    };
    if (C.ping_pong && wg == C.num_wg - 1) signal_next();

    float o[C.head_dim_v / 2] = {};
    u32 p[C.tile_n / 8];
    float rescale[2];

    // Issues S = Q K^T for the current K stage, as one wgmma group.
    auto issue_s = [&](float(&s)[C.tile_n / 2]) {
        const Descriptor a = desc_q.recomputed();
        const Descriptor b = desc_k.recomputed();
        const u32 q_stage = q_state.stage * T::Q::kBytes;
        const u32 stage = k_state.stage * T::K::kBytes;
        wgmma::fence();
#pragma unroll
        for (int k = 0; k < C.head_dim; k += 32) {
            T::MmaS::ss(s, a.at(q_stage + T::Q::column_offset(k)), b.at(stage + T::K::column_offset(k)),
                        k != 0);
        }
        wgmma::commit();
    };
    // Issues d (+)= P V for the columns of a slice and the current V stage, as one wgmma group.
    auto issue_pv = [&](float(&d)[C.slice / 2], int slice, bool accumulate) {
        const Descriptor b = desc_v.recomputed();
        const u32 stage = v_state.stage * T::Vt::kBytes + T::Vt::row_offset(slice * C.slice);
        wgmma::fence();
#pragma unroll
        for (int k = 0; k < C.tile_n; k += 32)
            T::MmaO::rs(d, p + k / 8, b.at(stage + T::Vt::column_offset(k)), k != 0 || accumulate);
        wgmma::commit();
    };
    // Makes P the A operand of P V. Of 16 keys a thread has four, in the order in which V's rows are stored
    // (tile/transpose_bytes.cuh).
    auto pack_p = [&](const float(&s)[C.tile_n / 2]) {
#pragma unroll
        for (int i = 0; i < C.tile_n / 8; ++i) {
            const float* own = s + i / 2 * 8 + i % 2 * 2;
            p[i] = pack_e4m3(own[0], own[1], own[4], own[5]);
        }
    };
    auto release_k = [&] {
        smem.k_bars.release(k_state, elected);
        k_state.advance();
    };
    auto release_v = [&] {
        smem.vt_bars.release(v_state, elected);
        v_state.advance();
    };
    // Computes O = O * rescale + P V for the current V stage, and releases it.
    auto add_pv = [&](bool accumulate) {
        smem.vt_bars.wait_full(v_state);
        if constexpr (!C.two_level) {
            if (accumulate) scale_rows(o, rescale);
            issue_pv(o, 0, accumulate);
            wgmma::wait<0>();
        } else {
            // One slice after the other: registers for two would be those of longer tiles of keys.
#pragma unroll
            for (int slice = 0; slice < T::kSlices; ++slice) {
                float products[C.slice / 2];
                issue_pv(products, slice, false);
                wgmma::wait<0>();
                add_products(o, products, slice * C.slice / 2, rescale);
            }
        }
        release_v();
    };

    // Keeps the exponentials ahead of what follows: see fwd_consumer.cuh.
    auto hold = [&](const float(&sum)[2]) {
        if (sum[0] + sum[1] < 0.f) pause();
    };

    int index = tiles.begin(params, cta_index());
    while (index < tiles.count(params)) {
        const WorkTile tile = tiles.tile_of(params, index, heads);
        const auto seqlen = tiles.seqlen_of(params, tile);
        const VisibleKeys<C> visible{params.shape, seqlen};
        const Rows<C.pack_gqa> rows(params.shape);
        const Blocks blocks = key_list(params, tile.batch, tile.head, tile.m_block);
        const BlockRange range = tile_blocks<C>(params, visible, tile, blocks);
        const int tile_rows = fa::tile_rows<C.pack_gqa, C.tile_m>(params);
        const int row = tile.m_block * tile_rows + own_row;
        // The end of the tile's rows, recomputed at each use to save a register.
        auto end = [&] { return rows.end(seqlen, tile.m_block, tile_rows); };
        const int kv_head = C.pack_gqa ? tile.head : tile.head / params.shape.group_size;

        if (!range.empty()) {
            const AlibiRows<C.alibi, C.mask, C.pack_gqa> alibi(params, seqlen, row, tile.head, tile.batch,
                                                               kLog2e);
            const ScoreParams scores = descaled_scores(params, tile.batch, kv_head);
            const ScoreMod<C.softcap> score_mod{scores};
            const float to_log2 = score_mod.to_log2();
            // With ALiBi the scores are exponents already.
            const float scale_log2 = C.alibi ? 1.f : to_log2;

            // Turns products into masked scores.
            auto modify = [&](float(&s)[C.tile_n / 2], int n_block) {
                score_mod.apply(s);
                alibi.apply(s, to_log2, n_block * C.tile_n + own_column);
                if (!range.needs_mask(n_block)) return;
                auto query_of = [&](int r) { return rows.query(row + 8 * r); };
                mask_tile(s, visible, query_of, n_block * C.tile_n + own_column);
            };

            Softmax<C.exp_poly_of_16, 0, Exponential::Base2Approx, false, kP8Offset> softmax;
            smem.q_bars.wait_full(q_state);
            // The first tile of keys: there is nothing to rescale.
            int n_block = range.end - 1;
            {
                float s[C.tile_n / 2];
                smem.k_bars.wait_full(k_state);
                issue_s(s);
                // Loaded under the product. With split keys the combine kernel adds them.
                float sink[2] = {minus_infinity(), minus_infinity()};
                if constexpr (C.sinks) {
                    if (!C.split || tile.splits == 1) load_sinks<C.pack_gqa>(params, row, tile.head, sink);
                }
                if constexpr (C.two_level) {
#pragma unroll
                    for (float& sum : o) sum = 0.f;
                }
                wgmma::wait<0>();
                release_k();
                modify(s, n_block);
                if constexpr (C.sinks) softmax.begin(sink);
                softmax.template step<true>(s, scale_log2, rescale);
                if constexpr (C.sinks) softmax.add_sinks(sink, own_column == 0);
                pack_p(s);
            }
            bool accumulate = false;
            if constexpr (C.overlap_wg) {
                // Overlap: the softmax runs under the next tile's S and this tile's P V.
                while (--n_block >= range.begin) {
                    float s[C.tile_n / 2];
                    [[maybe_unused]] float products[C.two_level ? C.slice / 2 : 1];
                    float next_rescale[2];
                    smem.k_bars.wait_full(k_state);
                    wait_turn();
                    issue_s(s);
                    smem.vt_bars.wait_full(v_state);
                    if constexpr (C.two_level) {
                        issue_pv(products, 0, false);
                    } else {
                        issue_pv(o, 0, accumulate);
                    }
                    signal_next();
                    wgmma::wait<1>();
                    release_k();
                    modify(s, n_block);
                    softmax.template take_max<false>(s, scale_log2, next_rescale);
                    softmax.template exponentiate<kEarly>(s, 0, scale_log2);
                    hold(softmax.sum);
                    wgmma::wait<0>();
                    release_v();
                    if constexpr (C.two_level) add_products(o, products, 0, rescale);
                    softmax.template exponentiate<C.tile_n / 2 - kEarly>(s, kEarly, scale_log2);
                    pack_p(s);
                    rescale[0] = next_rescale[0];
                    rescale[1] = next_rescale[1];
                    accumulate = true;
                    if constexpr (!C.two_level) scale_rows(o, rescale);
                }
                smem.q_bars.release(q_state, elected);
                if constexpr (!C.two_level) rescale[0] = rescale[1] = 1.f;
            } else {
                // One product after the other: with ping-pong another warpgroup's products run under this
                // one's softmax.
                while (--n_block >= range.begin) {
                    wait_turn();
                    add_pv(accumulate);
                    accumulate = true;
                    float s[C.tile_n / 2];
                    smem.k_bars.wait_full(k_state);
                    issue_s(s);
                    signal_next();
                    wgmma::wait<0>();
                    release_k();
                    modify(s, n_block);
                    softmax.template step<false>(s, scale_log2, rescale);
                    pack_p(s);
                }
                smem.q_bars.release(q_state, elected);
            }
            q_state.advance();
            add_pv(accumulate);
            float factor[2], lse[2];
            softmax.finish(factor, lse);
            if constexpr (C.sinks) {
                if ((!C.split || tile.splits == 1) && softmax.is_beyond_sinks(lse)) {
                    float sink[2];
                    load_sinks<C.pack_gqa>(params, row, tile.head, sink);
                    softmax.relate_to_sinks(sink, lse);
                }
            }
            descale_rows(params, tile.batch, kv_head, factor);
            if (C.split && tile.splits > 1) {
                store_partial8(workspace_rows(params, tile, heads), params.shape.head_dim_v, o, factor, lse,
                               row, end(), own_row);
            } else {
                store_output8<C>(params, seqlen, o, factor, lse, row, end(), tile);
            }
        } else if (C.split && tile.splits > 1) {
            store_nothing_partial(workspace_rows(params, tile, heads), row, end(), own_row);
        } else {
            store_nothing_seen<C.pack_gqa, C.sinks>(params, seqlen, row, end(), tile.head, tile.batch);
        }
        index = tiles.next(smem, params, index);
    }
}

}  // namespace fa::sm90
