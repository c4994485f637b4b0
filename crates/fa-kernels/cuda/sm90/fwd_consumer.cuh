// The consumers of the SM90 forward: each warpgroup computes 64 query rows over the keys that they see.
#pragma once
#include "attn/ahead_copies.cuh"
#include "attn/alibi.cuh"
#include "attn/block_range.cuh"
#include "attn/descales.cuh"
#include "attn/epilogue.cuh"
#include "attn/mask.cuh"
#include "attn/mask_bits.cuh"
#include "attn/programs.cuh"
#include "attn/row_place.cuh"
#include "attn/rows.cuh"
#include "attn/score_mod.cuh"
#include "attn/softmax.cuh"
#include "attn/split.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/fwd_combine.cuh"
#include "sm90/fwd_layout.cuh"
#include "sm90/fwd_shift.cuh"
#include "sm90/fwd_tiles.cuh"
#include "tile/descriptor.cuh"
#include "tile/pipeline.cuh"
#include "tile/stmatrix_tile.cuh"

namespace fa::sm90 {

// The number of exponentials computed before the wait for P V. P V finishes at about the time of the maximum
// and these first exponentials; the remaining ones then run under the conversion of P and the rescaling of O.
// It is a quarter of them, in steps of 8 registers; with three warpgroups there are registers for 8 only.
template <Sm90FwdConfig C>
constexpr int kEarly = C.lazy_max && C.num_wg == 3 ? 8 : max_of(8, C.tile_n / 2 / 4 / 8 * 8);

// The softmax of S while P V of the previous tile runs; releases the V stage once that is done.
template <Sm90FwdConfig C, class Softmax, class Hold, class Release>
__device__ __forceinline__ void softmax_under_pv(Softmax& softmax, float (&s)[C.tile_n / 2], float scale_log2,
                                                 float (&rescale)[2], const Hold& hold,
                                                 const Release& release_v) {
    softmax.template take_max<false>(s, scale_log2, rescale);
    softmax.template exponentiate<kEarly<C>>(s, 0, scale_log2);
    hold(softmax.sum);
    wgmma::wait<0>();
    release_v();
    softmax.template exponentiate<C.tile_n / 2 - kEarly<C>>(s, kEarly<C>, scale_log2);
}

// The same against the current maximum; also packs P and, where the scores have outgrown the maximum,
// rescales O. `as_products`: `s` still holds products, assumed to give scores of at most half the soft cap.
// If one does not, `near` becomes false and P is recomputed as if the maximum had been outgrown.
template <Sm90FwdConfig C, class Softmax, class Hold, class Release, class Weigh, class PackP>
__device__ __forceinline__ void lazy_softmax_under_pv(Softmax& softmax, const ScoreMod<C.softcap>& score_mod,
                                                      bool as_products, bool& near, float (&s)[C.tile_n / 2],
                                                      float scale_log2, u32 (&p)[C.tile_n / 4],
                                                      float (&o)[C.head_dim_v / 2], float (&rescale)[2],
                                                      const Hold& hold, const Release& release_v,
                                                      const Weigh& weigh, const PackP& pack_p) {
    constexpr int kLate = C.tile_n / 2 - kEarly<C>;
    float early[kEarly<C>], late[kLate];
    float block_sum[2] = {0.f, 0.f};
    u32 beyond = 0;
    auto exponentials = [&](auto& of, int begin) {
        if (C.near_cap && as_products) {
            auto exponent = [&](float x, float max) { return score_mod.near_exponent(x, max, beyond); };
            softmax.exponentials_by_current_max(s, begin, exponent, of, block_sum);
        } else {
            auto exponent = [&](float x, float max) { return fmaf(x, scale_log2, -max); };
            softmax.exponentials_by_current_max(s, begin, exponent, of, block_sum);
        }
    };
    exponentials(early, 0);
    hold(block_sum);
    wgmma::wait<0>();
    release_v();
    exponentials(late, kEarly<C>);
    weigh(early, 0);
    weigh(late, kEarly<C>);
    // `p` is an operand of the running product until the wait, so it is packed only now.
#pragma unroll
    for (int i = 0; i < kEarly<C> / 2; ++i) p[i] = pack<C.dtype>(early[2 * i], early[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < kLate / 2; ++i) p[kEarly<C> / 2 + i] = pack<C.dtype>(late[2 * i], late[2 * i + 1]);
    if constexpr (C.near_cap) {
        if (int(beyond) < 0) block_sum[0] = -minus_infinity();
    }
    if (softmax.template outgrown<C.rescale_threshold>(block_sum)) {
        if (C.near_cap && as_products) {
            near = !warp_any(int(beyond) < 0);
            score_mod.apply(s);
        }
        softmax.template step<false>(s, scale_log2, rescale);
        weigh(s, 0);
        pack_p();
        scale_rows(o, rescale);
    } else {
        softmax.sum[0] += block_sum[0];
        softmax.sum[1] += block_sum[1];
    }
}

// The bits of a program's mask that a consumer's thread reads.
template <Sm90FwdConfig C>
using FwdMaskBits = MaskBits<C.tile_n / 2, 1, 128 * C.num_wg>;

// The bits of the tiles of keys that tiles of queries visit.
template <Sm90FwdConfig C>
__device__ __forceinline__ void keep_mask_bits(const FwdParams& params) {
    const BlockMapParams& map = map_of(params);
    const int tile_rows = fa::tile_rows<C.pack_gqa, C.tile_m>(params);
    const int own_row = 16 * (thread_index() / 32) + lane_index() / 4, own_column = 2 * (lane_index() % 4);
    auto place_of = [&](int batch, int head, int m_block, int n_block, int) {
        return row_place<C.pack_gqa>(params.shape, Seqlen<C.varied>::of(params, batch), batch, head,
                                     m_block * tile_rows + own_row, n_block * C.tile_n + own_column);
    };
    fa::keep_mask_bits<FwdMaskBits<C>, 1, mask_tile_words<C>(), true>(programs_of(params), map, map.rows,
                                                                      map.columns, place_of);
}

template <Sm90FwdConfig C>
__device__ __forceinline__ void consume(SharedStorage<C>& smem, const FwdParams& params, int wg) {
    using T = Traits<C>;
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
    const Descriptor desc_v = descriptor_mn_major<typename T::V>(smem_address(smem.v[0]));
    u32 address_p = 0;
    if constexpr (!C.pv_is_rs) address_p = smem_address(smem.p.tiles[wg]);
    const Descriptor desc_p = descriptor_k_major<typename T::P>(address_p);

    PipelineState<C.q_stages> q_state;
    PipelineState<C.kv_stages> k_state, v_state;
    TileSource<C> tiles(params, cta_index(), heads);
    TileScores<T::kCodes> scores(params);
    const ScoreMod<C.softcap> score_mod{scores.params};
    // With ALiBi and programs the scores are exponents already.
    float to_log2 = score_mod.to_log2();
    float scale_log2 = C.alibi || kScoreProgram ? 1.f : to_log2;

    // Ping-pong: warpgroups issue products in turn. Warpgroup i waits at named barrier 1 + i, then signals
    // the next one.
    auto wait_turn = [&] {
        if constexpr (C.ping_pong) named_barrier_sync(1 + wg, 256);
    };
    auto signal_next = [&] {
        if constexpr (C.ping_pong) named_barrier_arrive(1 + (wg + 1 == C.num_wg ? 0 : wg + 1), 256);
    };
    if (C.ping_pong && wg == C.num_wg - 1) signal_next();

    float s[C.tile_n / 2];
    // Zeros, although the first product overwrites them: ptxas before 12.9 initialises undefined accumulators
    // beside the wgmma and then serialises all of them (C7515).
    float o[C.head_dim_v / 2] = {};
    u32 p[C.pv_is_rs ? C.tile_n / 4 : 1];
    float rescale[2];

    // Issues S = Q K^T for the current K stage, as one wgmma group.
    auto issue_s = [&] {
        const Descriptor a = desc_q.recomputed();
        const Descriptor b = desc_k.recomputed();
        const u32 q_stage = q_state.stage * T::Q::kBytes;
        const u32 stage = k_state.stage * T::K::kBytes;
        wgmma::fence();
#pragma unroll
        for (int k = 0; k < C.head_dim; k += 16) {
            T::MmaS::template ss<0, 0>(s, a.at(q_stage + T::Q::column_offset(k)),
                                       b.at(stage + T::K::column_offset(k)), k != 0);
        }
        wgmma::commit();
    };
    // Issues O += P V for the current V stage, as one wgmma group.
    auto issue_pv = [&](bool accumulate) {
        const Descriptor b = desc_v.recomputed();
        const u32 stage = v_state.stage * T::V::kBytes;
        wgmma::fence();
#pragma unroll
        for (int k = 0; k < C.tile_n; k += 16) {
            const u64 step = b.at(stage + T::V::row_offset(k));
            if constexpr (C.pv_is_rs) {
                T::MmaO::template rs<1>(o, p + k / 4, step, k != 0 || accumulate);
            } else {
                T::MmaO::template ss<0, 1>(o, desc_p.at(T::P::column_offset(k)), step, k != 0 || accumulate);
            }
        }
        wgmma::commit();
    };
    // Makes P the A operand of P V: packs it in registers, where S is in A's order already (PTX ISA, wgmma
    // fragments), or stores it to shared memory.
    auto pack_p = [&] {
        if constexpr (C.pv_is_rs) {
#pragma unroll
            for (int i = 0; i < C.tile_n / 4; ++i) p[i] = pack<C.dtype>(s[2 * i], s[2 * i + 1]);
        } else {
            store_accumulator_tile<C.dtype, typename T::P>(address_p, s, warp, lane);
            fence_async_shared();
            warp_sync();
        }
    };
    auto release_k = [&] {
        smem.k_bars.release(k_state, elected);
        k_state.advance();
    };
    auto release_v = [&] {
        smem.v_bars.release(v_state, elected);
        v_state.advance();
    };

    // Skipped tiles are released unread, and their turns pass to the next warpgroup. No wgmma keeps the lanes
    // converged here, hence warp_sync(): if one lane released before another has seen the phase, the stage
    // could be refilled, and the other lane would wait for a phase that is over.
    auto skip_k = [&] {
        smem.k_bars.wait_full(k_state);
        warp_sync();
        release_k();
    };
    auto skip_v = [&] {
        smem.v_bars.wait_full(v_state);
        warp_sync();
        release_v();
    };
    auto skip_turn = [&] {
        wait_turn();
        signal_next();
    };

    // Keeps the exponentials ahead of what follows. ptxas would move the wait for a running product up to the
    // start of the softmax that is meant to overlap it; it cannot move it across a branch on the sums (never
    // taken: P is not negative).
    auto hold = [&](const float(&sum)[2]) {
        if (sum[0] + sum[1] < 0.f) pause();
    };

    int index = tiles.begin(params, cta_index());
    while (index < tiles.count(params)) {
        const WorkTile tile = tiles.tile_of(params, index, heads);
        const auto seqlen = tiles.seqlen_of(params, tile);
        const VisibleKeys<C> visible{params.shape, seqlen};
        const Rows<C.pack_gqa> rows(params.shape);
        const Blocks blocks = key_list<mask_tile_words<C>()>(params, tile.batch, tile.head, tile.m_block);
        const BlockRange all = tile_blocks<C>(params, visible, tile, blocks);
        BlockRange range = all;
        if constexpr (C.skips_blocks) range = warpgroup_blocks<C>(params, visible, rows, tile, all, 64 * wg);
        const int skipped = all.end - range.end;
        const int tile_rows = fa::tile_rows<C.pack_gqa, C.tile_m>(params);
        const int row = tile.m_block * tile_rows + own_row;
        // The end of the tile's rows, recomputed at each use to save a register.
        auto end = [&] { return rows.end(seqlen, tile.m_block, tile_rows); };
        if constexpr (T::kCodes) {
            const int kv_head = C.pack_gqa ? tile.head : tile.head / params.shape.group_size;
            scores.of_tile(params, tile.batch, kv_head);
            to_log2 = score_mod.to_log2();
            if constexpr (!C.alibi && !kScoreProgram) scale_log2 = to_log2;
        }
        Softmax<C.exp_poly_of_16, C.lazy_max ? 0 : C.rescale_threshold> softmax;

        const AlibiRows<C.alibi, C.mask, C.pack_gqa> alibi(params, seqlen, row, tile.head, tile.batch,
                                                           kLog2e);

        // Whether no score of the warp's rows has exceeded half the soft cap so far: see near_exponent().
        bool near = C.near_cap;

        // What a program reads of the tile of keys at place `i`, issued before the wait for its products.
        Ahead<ScorePlace<false, C.pack_gqa>, C.tile_n / 2> ahead;
        FwdMaskBits<C> mask_bits;
        typename T::Copies copies;
        u32 copied = 0;
        if constexpr (copies_ahead()) copied = smem_address(smem.ahead.parts[4 * wg + warp]);
        // Starts to copy what it reads of the tile of keys at place `i`.
        auto copy_ahead = [&](int i) {
            if constexpr (copies_ahead()) {
                if (i < range.begin) return;
                copies.start(copied, programs_of(params), blocks.at(i) * C.tile_n);
            }
        };
        auto place_of = [&](int n_block) {
            return row_place<C.pack_gqa>(params.shape, seqlen, tile.batch, tile.head, row,
                                         n_block * C.tile_n + own_column);
        };
        auto read_ahead = [&](int i) {
            if constexpr (T::kRowsAhead) {
                return RowsAhead(programs_of(params), place_of(blocks.at(i)));
            } else {
                if constexpr (T::kReadsCopiesAhead) {
                    copies.read(ahead.words_of, copied);
                    copy_ahead(i - 1);
                } else if constexpr (kScoreProgram && !copies_ahead()) {
                    ahead.read(programs_of(params), place_of(blocks.at(i)));
                }
                return NoRowsAhead();
            }
        };
        // The bits of the mask's program, a tile of keys before they are needed.
        auto read_mask_bits = [&](int i) {
            if constexpr (kMaskProgram) {
                const BlockMapParams& map = map_of(params);
                if (i < range.begin) return;
                mask_bits.read(map, blocks.words(), map.columns, blocks.count() - 1 - i, blocks.full(i),
                               thread_index() - 128);
            }
        };

        // Turns products into masked scores of the tile of keys at place `i`.
        auto modify = [&](int i, [[maybe_unused]] const auto rows_ahead) {
            int n_block = i;
            if constexpr (kMaskProgram) n_block = blocks.at(i);
            score_mod.apply(s);
            alibi.apply(s, to_log2, n_block * C.tile_n + own_column);
            if constexpr (kMaskProgram || kScoreProgram) {
                [[maybe_unused]] const auto place = place_of(n_block);
                if constexpr (T::kRowsAhead) {
                    to_exponents(s, scores.params, rows_ahead);
                } else if constexpr (copies_ahead() && !T::kReadsCopiesAhead) {
                    to_exponents(s, params, scores.params, place, copies, copied);
                    copy_ahead(i - 1);
                } else if constexpr (kScoreProgram) {
                    to_exponents(s, params, scores.params, place, ahead);
                }
                if constexpr (kMaskProgram) mask_bits.hide(s, 0, programs_of(params), place);
                read_mask_bits(i - 1);
            }
            if (range.needs_mask(n_block)) {
                auto query_of = [&](int r) { return rows.query(row + 8 * r); };
                mask_tile(s, visible, query_of, n_block * C.tile_n + own_column);
            }
        };

        // Weights the probabilities of the tile of keys at place `i`, from register `begin` on.
        auto weigh_tile = [&](auto& p, int i, int begin) {
            if constexpr (weighs()) {
                const int first_key = blocks.at(i) * C.tile_n + own_column + 2 * begin;
                weigh(p, params,
                      row_place<C.pack_gqa>(params.shape, seqlen, tile.batch, tile.head, row, first_key));
            }
        };

        if (!range.empty()) {
            if constexpr (copies_ahead()) {
                const auto place =
                    row_place<C.pack_gqa>(params.shape, seqlen, tile.batch, tile.head, row, own_column);
                copies.prepare(programs_of(params), place, seqlen.k());
                copy_ahead(range.end - 1);
            }
            smem.q_bars.wait_full(q_state);
            if constexpr (C.skips_blocks) {
#pragma unroll 1
                for (int i = 0; i < skipped; ++i) skip_k();
            }
            // The first tile of keys: there is nothing to rescale.
            int n_block = range.end - 1;
            smem.k_bars.wait_full(k_state);
            issue_s();
            // With split keys the combine kernel adds the sinks. They are loaded under the product.
            float sink[2] = {minus_infinity(), minus_infinity()};
            if constexpr (C.sinks) {
                if (!C.split || tile.splits == 1) load_sinks<C.pack_gqa>(params, row, tile.head, sink);
            }
            const auto rows_ahead = read_ahead(n_block);
            read_mask_bits(n_block);
            wgmma::wait<0>();
            release_k();
            modify(n_block, rows_ahead);
            if constexpr (C.sinks) softmax.begin(sink);
            softmax.template step<true>(s, scale_log2, rescale);
            if constexpr (C.sinks) softmax.add_sinks(sink, own_column == 0);
            weigh_tile(s, n_block, 0);
            pack_p();
            if constexpr (C.skips_blocks) {
#pragma unroll 1
                for (int i = 0; i < skipped; ++i) {
                    skip_v();
                    skip_turn();
                }
            }

            bool accumulate = false;
            if constexpr (C.overlap_wg) {
                // Overlap: the softmax runs under the next tile's S and this tile's P V.
                while (--n_block >= range.begin) {
                    smem.k_bars.wait_full(k_state);
                    wait_turn();
                    issue_s();
                    if constexpr (T::kRescaleFirst && !C.lazy_max) {
                        if (accumulate) scale_rows(o, rescale);
                    }
                    smem.v_bars.wait_full(v_state);
                    issue_pv(accumulate);
                    signal_next();
                    const auto rows_ahead = read_ahead(n_block);
                    wgmma::wait<1>();
                    release_k();
                    if constexpr (C.lazy_max) {
                        const bool as_products = near && !range.needs_mask(n_block);
                        if (!as_products) modify(n_block, rows_ahead);
                        auto weigh_part = [&](auto& of, int begin) { weigh_tile(of, n_block, begin); };
                        lazy_softmax_under_pv<C>(softmax, score_mod, as_products, near, s, scale_log2, p, o,
                                                 rescale, hold, release_v, weigh_part, pack_p);
                    } else {
                        modify(n_block, rows_ahead);
                        softmax_under_pv<C>(softmax, s, scale_log2, rescale, hold, release_v);
                        weigh_tile(s, n_block, 0);
                        pack_p();
                        if constexpr (!T::kRescaleFirst) scale_rows(o, rescale);
                    }
                    accumulate = true;
                }
                smem.q_bars.release(q_state, elected);
                if constexpr (T::kRescaleFirst && !C.lazy_max) {
                    if (accumulate) scale_rows(o, rescale);
                }
                smem.v_bars.wait_full(v_state);
                issue_pv(accumulate);
            } else {
                // No overlap: one product after the other. With ping-pong another warpgroup's products run
                // under this one's softmax.
                smem.v_bars.wait_full(v_state);
                issue_pv(false);
                while (--n_block >= range.begin) {
                    smem.k_bars.wait_full(k_state);
                    wait_turn();
                    issue_s();
                    signal_next();
                    const auto rows_ahead = read_ahead(n_block);
                    wgmma::wait<0>();
                    release_k();
                    release_v();
                    modify(n_block, rows_ahead);
                    softmax.template step<false>(s, scale_log2, rescale);
                    weigh_tile(s, n_block, 0);
                    pack_p();
                    scale_rows(o, rescale);
                    smem.v_bars.wait_full(v_state);
                    issue_pv(true);
                }
                smem.q_bars.release(q_state, elected);
            }
            q_state.advance();
            float factor[2], lse[2];
            softmax.finish(factor, lse);
            wgmma::wait<0>();
            release_v();
            if constexpr (C.sinks) {
                if ((!C.split || tile.splits == 1) && softmax.is_beyond_sinks(lse)) {
                    float sink[2];
                    load_sinks<C.pack_gqa>(params, row, tile.head, sink);
                    softmax.relate_to_sinks(sink, lse);
                }
            }
            if constexpr (kScoreProgram) softmax.keep_lowest(lse);
            const int kv_head = C.pack_gqa ? tile.head : tile.head / params.shape.group_size;
            if constexpr (T::kCodes) descale_rows(params, tile.batch, kv_head, factor);
            const int shift = value_shift<C>(params, kv_head);
            if (C.split && tile.splits > 1) {
                store_partial(partial_rows<C>(smem, params, tile, heads), params.shape.head_dim_v, o, factor,
                              lse, row, end(), own_row, shift);
            } else {
                store_output<C.dtype, C.pack_gqa>(params, seqlen, o, factor, lse, row, end(), tile.head,
                                                  tile.batch, shift);
            }
        } else {
            if constexpr (C.skips_blocks) {
                if (skipped > 0) {
                    smem.q_bars.wait_full(q_state);
#pragma unroll 1
                    for (int i = 0; i < skipped; ++i) {
                        skip_k();
                        skip_v();
                        if (i > 0) skip_turn();
                    }
                    smem.q_bars.release(q_state, elected);
                    q_state.advance();
                }
            }
            if (C.split && tile.splits > 1) {
                store_no_part<C>(smem, params, tile, heads, row, end(), own_row);
            } else {
                store_nothing_seen<C.pack_gqa, C.sinks>(params, seqlen, row, end(), tile.head, tile.batch);
            }
        }
        index = tiles.next(smem, params, index);
    }
    // In a cluster a CTA has a single work tile.
    if constexpr (T::kPartsInClusters) {
        if (cluster_cta_count() > 1) combine_in_cluster<C>(smem, params, heads);
    }
}

}  // namespace fa::sm90
