// The consumers of the SM90 forward for wide heads: two warpgroups that share the columns of O. The leader
// computes S and P, which it passes to the follower through shared memory, and the first half of O's columns;
// the follower computes the second half.
#pragma once
#include "attn/alibi.cuh"
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
#include "attn/store_rows.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/wide_layout.cuh"
#include "sm90/wide_tiles.cuh"
#include "tile/descriptor.cuh"
#include "tile/pipeline.cuh"
#include "tile/stmatrix_tile.cuh"
#include "types.cuh"

namespace fa::wide {

// Named barriers between the two: P and its factors are in shared memory; they have been read.
constexpr int kReady = 1, kRead = 2;

// What both warpgroups do: products with their columns of V, and the store of their columns of O.
template <Sm90WideConfig C>
struct Columns {
    using T = Traits<C>;
    static constexpr int kRegisters = T::kColumns / 2;

    SharedStorage<C>& smem;
    const FwdParams& params;
    int first;  // of the columns
    bool elected;
    int own_row;  // the thread's first accumulator row
    Descriptor desc_v;
    PipelineState<C.kv_stages> state;

    __device__ __forceinline__ Columns(SharedStorage<C>& smem, const FwdParams& params, int first)
        : smem(smem), params(params), first(first), elected(elect_one()),
          own_row(16 * (warp_index() % 4) + lane_index() / 4),
          desc_v(descriptor_mn_major<typename T::V>(smem_address(smem.values()) +
                                                    first / 64 * T::V::kPanelBytes)) {}

    // Scales O's rows, unless all factors of the warp are 1.
    __device__ __forceinline__ static void rescale(float (&o)[kRegisters], const float (&factor)[2]) {
        if (warp_any(factor[0] != 1.f || factor[1] != 1.f)) scale_rows(o, factor);
    }

    // Issues O += P V for V's current stage, as one wgmma group, by `product(o, k, V's descriptor,
    // accumulate)` for each k16 step.
    template <class Product>
    __device__ __forceinline__ void issue(float (&o)[kRegisters], bool accumulate, const Product& product) {
        smem.value_bars().wait_full(state);
        const Descriptor b = desc_v.recomputed();
        const u32 stage = state.stage * kValueStage<C>;
        wgmma::fence();
#pragma unroll
        for (int k = 0; k < C.tile_n; k += 16)
            product(o, k, b.at(stage + T::V::row_offset(k)), k != 0 || accumulate);
        wgmma::commit();
    }

    // Waits for all products and releases the stage.
    __device__ __forceinline__ void finish() {
        wgmma::wait<0>();
        smem.value_bars().release(state, elected);
        state.advance();
    }

    // Stores the columns, times `factor`, in O or in the partial result of a part of the keys.
    __device__ __forceinline__ void store(const QueryTile<C>& work, const float (&o)[kRegisters],
                                          const float (&factor)[2]) const {
        const int tile_rows = fa::tile_rows<C.pack_gqa, C.tile_m>(params);
        const int row = work.tile.m_block * tile_rows + own_row;
        const int end = Rows<C.pack_gqa>(params.shape).end(work.seqlen, work.tile.m_block, tile_rows);
        const int columns = params.shape.head_dim_v;
        if (work.is_part()) {
            const PartialRows partial = workspace_rows(params, work.tile, tile_heads<C>(params));
            const int lane = thread_index() % 4;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (row + 8 * r >= end) continue;
                float* out = partial.out + i64(own_row + 8 * r) * partial.stride + first + 2 * lane;
#pragma unroll
                for (int block = 0; block < kRegisters / 4; ++block) {
                    const int i = 4 * block + 2 * r;
                    if (first + 8 * block < columns)
                        *reinterpret_cast<float2*>(out + 8 * block) = {o[i] * factor[r],
                                                                       o[i + 1] * factor[r]};
                }
            }
        } else {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const OutputRow<C.pack_gqa> target(params, work.seqlen, row + 8 * r, end, work.tile.head,
                                                   work.tile.batch);
                store_fragment_row<C.dtype>(r, target.out, target.inside, o, factor[r], first, columns);
            }
        }
    }

    // Stores the LSE of the thread's rows.
    __device__ __forceinline__ void store_lse(const QueryTile<C>& work, const float (&lse)[2]) const {
        if (lane_index() % 4 != 0) return;
        const int tile_rows = fa::tile_rows<C.pack_gqa, C.tile_m>(params);
        const int end = Rows<C.pack_gqa>(params.shape).end(work.seqlen, work.tile.m_block, tile_rows);
        for (int r = 0; r < 2; ++r) {
            const int in_tile = own_row + 8 * r, row = work.tile.m_block * tile_rows + in_tile;
            if (row >= end) continue;
            if (work.is_part()) {
                workspace_rows(params, work.tile, tile_heads<C>(params)).lse[in_tile] = lse[r];
            } else if (params.lse != nullptr) {
                const OutputRow<C.pack_gqa> target(params, work.seqlen, row, end, work.tile.head,
                                                   work.tile.batch);
                params.lse[target.lse] = lse[r];
            }
        }
    }

    // Stores a tile whose queries see no key, or no key of the part.
    __device__ __forceinline__ void store_nothing(const QueryTile<C>& work) const {
        const int tile_rows = fa::tile_rows<C.pack_gqa, C.tile_m>(params);
        const int row = work.tile.m_block * tile_rows + own_row;
        const int end = Rows<C.pack_gqa>(params.shape).end(work.seqlen, work.tile.m_block, tile_rows);
        if (work.is_part()) {
            store_nothing_partial(workspace_rows(params, work.tile, tile_heads<C>(params)), row, end,
                                  own_row);
        } else {
            store_nothing_seen<C.pack_gqa, C.sinks>(params, work.seqlen, row, end, work.tile.head,
                                                    work.tile.batch);
        }
    }
};

// The bits of a program's mask that a thread of the leader reads.
template <Sm90WideConfig C>
using LeaderMaskBits = MaskBits<C.tile_n / 2, 1, mask_bit_threads(C)>;

// The scores of rows `row` and `row` + 8 of a tile, and of the keys from `first_key` on, as programs see
// them. `head` is that of the tile.
template <Sm90WideConfig C>
__device__ __forceinline__ auto score_place(const ShapeParams& shape, const Seqlen<C.varied>& seqlen,
                                            int batch, int head, int row, int first_key) {
    auto place = row_place<C.pack_gqa>(shape, seqlen, batch, head, row, first_key);
    place.group *= C.head_parts;
    return place;
}

// The bits of the tiles of keys that tiles of queries visit.
template <Sm90WideConfig C>
__device__ __forceinline__ void keep_mask_bits(const FwdParams& params) {
    const BlockMapParams& map = map_of(params);
    const int tile_rows = fa::tile_rows<C.pack_gqa, C.tile_m>(params);
    const int own_row = 16 * (thread_index() / 32) + lane_index() / 4, own_column = 2 * (lane_index() % 4);
    auto place_of = [&](int batch, int head, int m_block, int n_block, int) {
        return score_place<C>(params.shape, Seqlen<C.varied>::of(params, batch), batch, head,
                              m_block * tile_rows + own_row, n_block * C.tile_n + own_column);
    };
    fa::keep_mask_bits<LeaderMaskBits<C>, 1, mask_tile_words<C>(), true>(programs_of(params), map, map.rows,
                                                                         map.columns, place_of);
}

template <Sm90WideConfig C>
__device__ __forceinline__ void lead(SharedStorage<C>& smem, const FwdParams& params) {
    using T = Traits<C>;
    Columns<C> own(smem, params, 0);
    const int warp = warp_index() % 4, lane = lane_index();
    const int own_column = 2 * (lane % 4);
    const Descriptor desc_q = descriptor_k_major<typename T::Q>(smem_address(smem.q));
    const Descriptor desc_k = descriptor_k_major<typename T::K>(smem_address(smem.k[0]));
    const u32 address_p = smem_address(smem.p);
    TileScores<T::kCodes> scores(params);
    const ScoreMod<C.softcap> score_mod{scores.params};
    // With ALiBi and programs the scores are exponents already.
    float to_log2 = score_mod.to_log2();
    float scale_log2 = C.alibi || kScoreProgram ? 1.f : to_log2;
    PipelineState<1> q_state;
    PipelineState<C.kv_stages> k_state;

    float s[C.tile_n / 2];
    float o[Columns<C>::kRegisters] = {};
    u32 p[C.tile_n / 4];

    // Gives the follower the rows' factors, and what was stored to shared memory before.
    auto publish = [&](const float(&factor)[2]) {
        if (lane % 4 == 0) {
            smem.factor[own.own_row] = factor[0];
            smem.factor[own.own_row + 8] = factor[1];
        }
        fence_async_shared();
        named_barrier_arrive(kReady, T::kThreads);
    };
    // Issues S = Q K^T for the next tile of keys, as one wgmma group.
    auto issue_s = [&] {
        smem.k_bars.wait_full(k_state);
        const Descriptor a = desc_q.recomputed(), b = desc_k.recomputed();
        const u32 stage = k_state.stage * T::K::kBytes;
        wgmma::fence();
#pragma unroll
        for (int k = 0; k < C.head_dim; k += 16) {
            T::MmaS::template ss<0, 0>(s, a.at(T::Q::column_offset(k)), b.at(stage + T::K::column_offset(k)),
                                       k != 0);
        }
        wgmma::commit();
    };
    auto issue_pv = [&](bool accumulate) {
        own.issue(o, accumulate, [&](auto& o, int k, u64 v, bool accumulate) {
            T::MmaO::template rs<1>(o, p + k / 4, v, accumulate);
        });
    };
    // P in the order of the A operand (PTX ISA, wgmma fragments), and for the follower in shared memory.
    auto give_p = [&](const float(&rescale)[2]) {
#pragma unroll
        for (int i = 0; i < C.tile_n / 4; ++i) p[i] = pack<C.dtype>(s[2 * i], s[2 * i + 1]);
        named_barrier_sync(kRead, T::kThreads);
        store_accumulator_tile<C.dtype, typename T::P>(address_p, s, warp, lane);
        publish(rescale);
    };

    for_each_tile<C>(params, [&](const QueryTile<C>& work) {
        if (work.range.empty()) {
            own.store_nothing(work);
            return;
        }
        const auto visible = work.visible(params);
        const Rows<C.pack_gqa> rows(params.shape);
        const int row = work.tile.m_block * tile_rows<C.pack_gqa, C.tile_m>(params) + own.own_row;
        const AlibiRows<C.alibi, C.mask, C.pack_gqa> alibi(params, work.seqlen, row, work.tile.head,
                                                           work.tile.batch, kLog2e);
        Softmax<C.exp_poly_of_16, C.rescale_threshold> softmax;
        float rescale[2];
        // Of latents V's descale is that of scores as well, or all are in the tiles.
        [[maybe_unused]] bool is_scaled = false;
        if constexpr (T::kCodes) {
            const int kv_head = work.kv_head(params), batch = work.tile.batch;
            if constexpr (C.latent) {
                is_scaled = scales_latents(params, batch, kv_head);
                scores.multiply(params, is_scaled ? 1.f : head_descale(cache_of(params).v, batch, kv_head));
            } else {
                scores.of_tile(params, batch, kv_head);
            }
            to_log2 = score_mod.to_log2();
            scale_log2 = C.alibi || kScoreProgram ? 1.f : to_log2;
        }

        // The scores of tile `n_block` of the keys as programs see them.
        auto place_of = [&](int n_block) {
            return score_place<C>(params.shape, work.seqlen, work.tile.batch, work.tile.head, row,
                                  n_block * C.tile_n + own_column);
        };
        // What a program reads of the tile at place `i`, issued before the wait for its products.
        Ahead<ScorePlace<false, C.pack_gqa>, C.tile_n / 2> ahead;
        auto read_ahead = [&](int i) {
            if constexpr (kScoreProgram) ahead.read(programs_of(params), place_of(work.blocks.at(i)));
        };
        // The bits of the mask's program, a tile before they are needed.
        LeaderMaskBits<C> mask_bits;
        auto read_mask_bits = [&](int i) {
            if constexpr (kMaskProgram) {
                if (i < work.range.begin) return;
                const BlockMapParams& map = map_of(params);
                mask_bits.read(map, work.blocks.words(), map.columns, work.blocks.count() - 1 - i,
                               work.blocks.full(i), thread_index() - 128);
            }
        };

        // After S of the tile at place `i`: releases what it read, and turns it into P.
        auto take_s = [&](int i) {
            // Latents are still to be multiplied by P.
            if constexpr (!C.latent) smem.k_bars.release(k_state, own.elected);
            k_state.advance();
            if (i == work.range.begin) smem.q_bars.release(q_state, own.elected);
            const int n_block = work.blocks.at(i), first_key = n_block * C.tile_n + own_column;
            score_mod.apply(s);
            alibi.apply(s, to_log2, first_key);
            if constexpr (kScoreProgram) to_exponents(s, params, scores.params, place_of(n_block), ahead);
            if constexpr (kMaskProgram) {
                mask_bits.hide(s, 0, programs_of(params), place_of(n_block));
                read_mask_bits(i - 1);
            }
            if (work.range.needs_mask(n_block))
                mask_tile(s, visible, [&](int r) { return rows.query(row + 8 * r); }, first_key);
            softmax.template step<false>(s, scale_log2, rescale);
            if constexpr (weighs()) weigh(s, params, place_of(n_block));
        };

        bool accumulate = false;
        int i = work.range.end - 1;
        read_mask_bits(i);
        smem.q_bars.wait_full(q_state);
        if constexpr (C.overlap) {
            // The softmax runs under this tile's P V, which follows the next tile's S.
            issue_s();
            read_ahead(i);
            wgmma::wait<0>();
            take_s(i);
            give_p(rescale);
#pragma unroll 1
            while (--i >= work.range.begin) {
                issue_s();
                if (accumulate) own.rescale(o, rescale);
                issue_pv(accumulate);
                read_ahead(i);
                wgmma::wait<1>();
                take_s(i);
                // ptxas would move the wait ahead of the softmax, but for a branch on the sums (never taken:
                // P is not negative).
                if (softmax.sum[0] + softmax.sum[1] < 0.f) pause();
                own.finish();
                give_p(rescale);
                accumulate = true;
            }
            if (accumulate) own.rescale(o, rescale);
            issue_pv(accumulate);
            own.finish();
        } else {
#pragma unroll 1
            for (; i >= work.range.begin; --i) {
                issue_s();
                read_ahead(i);
                wgmma::wait<0>();
                take_s(i);
                give_p(rescale);
                if (accumulate) own.rescale(o, rescale);
                issue_pv(accumulate);
                own.finish();
                accumulate = true;
            }
        }
        q_state.advance();
        float factor[2], lse[2];
        if (work.is_part()) {
            // The combine kernel adds the sinks.
            softmax.finish(factor, lse);
        } else {
            finish_rows<C.pack_gqa, C.sinks>(params, softmax, row, work.tile.head, factor, lse);
        }
        if constexpr (kScoreProgram) softmax.keep_lowest(lse);
        if constexpr (T::kCodes) {
            if (!is_scaled) descale_rows(params, work.tile.batch, work.kv_head(params), factor);
        }
        named_barrier_sync(kRead, T::kThreads);
        publish(factor);
        own.store_lse(work, lse);
        own.store(work, o, factor);
    });
}

template <Sm90WideConfig C>
__device__ __forceinline__ void follow(SharedStorage<C>& smem, const FwdParams& params) {
    using T = Traits<C>;
    Columns<C> own(smem, params, T::kColumns);
    const Descriptor desc_p = descriptor_k_major<typename T::P>(smem_address(smem.p));
    float o[Columns<C>::kRegisters] = {};

    // Waits for what the leader publishes, and reads the factors.
    auto receive = [&](float(&factor)[2]) {
        named_barrier_sync(kReady, T::kThreads);
        factor[0] = smem.factor[own.own_row];
        factor[1] = smem.factor[own.own_row + 8];
    };
    auto have_read = [&] { named_barrier_arrive(kRead, T::kThreads); };

    have_read();
    for_each_loaded<C>(params, [&](const QueryTile<C>& work) {
        float factor[2];
        bool accumulate = false;
#pragma unroll 1
        for (int i = work.range.end - 1; i >= work.range.begin; --i) {
            receive(factor);
            if (accumulate) own.rescale(o, factor);
            own.issue(o, accumulate, [&](auto& o, int k, u64 v, bool accumulate) {
                T::MmaO::template ss<0, 1>(o, desc_p.at(T::P::column_offset(k)), v, accumulate);
            });
            own.finish();
            have_read();
            accumulate = true;
        }
        receive(factor);
        have_read();
        own.store(work, o, factor);
    });
}

}  // namespace fa::wide
