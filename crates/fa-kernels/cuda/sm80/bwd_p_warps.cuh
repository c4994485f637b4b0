// The P warps of the SM80-class backward: P = exp(S - LSE), dV, and the first part of dQ.
#pragma once
#include "attn/alibi.cuh"
#include "attn/mask.cuh"
#include "attn/programs.cuh"
#include "attn/score_mod.cuh"
#include "config.cuh"
#include "ptx/address.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "sm80/bwd_group.cuh"
#include "sm80/bwd_layout.cuh"

namespace fa::sm80 {

template <Sm80BwdConfig C>
struct PWarps : BwdGroup<C> {
    using Base = BwdGroup<C>;
    using L = BwdLayout<C>;
    using CutS = typename L::CutS;
    using CutDv = typename L::CutDv;
    using CutDq = typename L::template CutDq<0>;
    using Base::params, Base::range, Base::smem, Base::tile;
    using typename Base::Here;
    using typename Base::Stats;

    // P as held in a register until it is stored. With a soft cap the register packs P and P times the cap's
    // derivative, 1 - share^2, each rounded. The dS warps could not recover the derivative from the rounded
    // P: where the cap saturates, the derivative is far below that rounding. A masked score has the share
    // -inf and P 0. The same holds for the slope of a program. A program's weight is a factor of the first:
    // dV has weighed probabilities, dS has not.
    __device__ __forceinline__ static float kept(float p, float share, float weight) {
        if constexpr (!kSlopedP<C>) return p;
        const float sloped = C.softcap ? p * ScoreMod<C.softcap>::slope(share) : p;
        return float_of_bits(pack<C.dtype>(weighs() ? p * weight : p, sloped));
    }
    // The weights of fragment `f` of a step.
    __device__ __forceinline__ void read_weights(float (&weights)[CutS::kRegisters], BwdStep step,
                                                 int f) const {
#pragma unroll
        for (int i = 0; i < CutS::kRegisters; ++i) weights[i] = 1.f;
        if constexpr (weighs()) weigh(weights, params, this->score_place(step, f));
    }
    __device__ __forceinline__ static void store_kept(u32 at, float first, float second) {
        if constexpr (kSlopedP<C>) {
            const u32 a = bits_of_float(first), b = bits_of_float(second);
            store_shared_u32(at, (a & 0xffff) | b << 16);
            store_shared_u32(at + L::Pds::kBytes, a >> 16 | (b & 0xffff0000));
        } else {
            store_shared_u32(at, pack<C.dtype>(first, second));
        }
    }

    // Turns S of a step into P, in place.
    __device__ __forceinline__ void probabilities(typename CutS::Accumulators& s, BwdStep step) const {
        float slope = 0.f;
        if constexpr (C.alibi) slope = alibi_slope<C.mask>(params.mods, tile.batch, step.head, kLog2e);
        CutS::clear(s);
        Base::template multiply<CutS, typename L::QOfS, typename L::KOfS, C.head_dim, Base::kAheadA, 2>(
            s, this->q_buffer(step), this->buffer(smem.k), step.m_block);
        Stats lse;
        this->read_stats(lse, this->lse_buffer(step), step);
        const Here place(step.m_block);
        const bool masked = range.needs_mask(this->block(step.m_block));
        const ScoreMod<C.softcap> score_mod{params.score};
        const float scale_log2 = score_mod.shares_to_log2();
#pragma unroll
        for (int f = 0; f < CutS::kFragments; ++f) {
            score_mod.apply_as_shares(s[f]);
            if (masked && !kScoreProgram) {
                auto query_of = [&](int r) {
                    return this->block(step.m_block) * C.tile_m + CutS::first_m(place.warp) + 16 * f + 8 * r +
                           place.lane / 4;
                };
                const int first_key =
                    tile.n_block * C.tile_n + CutS::first_n(place.warp) + 2 * (place.lane % 4);
                mask_tile(s[f], this->visible(), query_of, first_key);
            }
            if constexpr (kMaskProgram || kScoreProgram) {
                const auto scores = this->score_place(step, f);
                change(s[f], scores, !this->is_full(step.m_block), masked, lse[f]);
                if constexpr (kScoreProgram) continue;
            }
            float weights[CutS::kRegisters];
            read_weights(weights, step, f);
            if constexpr (C.alibi) {
                float bias[CutS::kRegisters] = {};
                const int query = this->block(step.m_block) * C.tile_m + CutS::first_m(place.warp) + 16 * f +
                                  place.lane / 4;
                const int diagonal = query + this->keys() - this->queries();
                add_alibi<C.mask>(bias, 0.f, {slope, slope}, {diagonal, diagonal + 8},
                                  tile.n_block * C.tile_n + CutS::first_n(place.warp) + 2 * (place.lane % 4));
#pragma unroll
                for (int i = 0; i < CutS::kRegisters; ++i) {
                    const float exponent = fmaf(s[f][i], scale_log2, bias[i] - lse[f][i >> 1 & 1]);
                    s[f][i] = kept(exp2_approx(exponent), s[f][i], weights[i]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < CutS::kRegisters; ++i) {
                    s[f][i] = kept(exp2_approx(fmaf(s[f][i], scale_log2, -lse[f][i >> 1 & 1])), s[f][i],
                                   weights[i]);
                }
            }
        }
    }

    // Turns a fragment of products into P by a score program, which the band has not masked yet; hides what
    // the mask's program hides.
    __device__ __forceinline__ void change(float (&s)[CutS::kRegisters], const ScorePlace<false>& place,
                                           bool masks, bool masked, const float (&lse)[2]) const {
        float slopes[CutS::kRegisters];
        if constexpr (kScoreSlope) slopes_of(slopes, s, params, place);
        apply_programs(s, params, params.score, place, kLog2e, masks);
        if constexpr (kScoreProgram) {
            if (masked) mask_tile(s, this->visible(), [&](int r) { return place.query[r]; }, place.key);
            float weights[CutS::kRegisters];
#pragma unroll
            for (int i = 0; i < CutS::kRegisters; ++i) weights[i] = 1.f;
            if constexpr (weighs()) weigh(weights, params, place);
#pragma unroll
            for (int i = 0; i < CutS::kRegisters; ++i) {
                const float p = probability(s[i], lse[i >> 1 & 1]);
                if constexpr (kSlopedP<C>) {
                    const float own = kScoreSlope ? sloped(p, slopes[i]) : p;
                    s[i] = float_of_bits(pack<C.dtype>(weighs() ? p * weights[i] : p, own));
                } else {
                    s[i] = p;
                }
            }
        }
    }

    __device__ __forceinline__ void store(const typename CutS::Accumulators& p, int m_block) const {
        const Here place(m_block);
#pragma unroll
        for (int i = 0; i < CutS::kRegisters; i += 4) {
            const u32 at = Base::words_at(this->buffer(smem.p), i, place);
#pragma unroll
            for (int f = 0; f < CutS::kFragments; ++f) {
                store_kept(at + f * Base::kFragmentBytes, p[f][i], p[f][i + 1]);
                store_kept(at + f * Base::kFragmentBytes + Base::kLowerBytes, p[f][i + 2], p[f][i + 3]);
            }
        }
    }

    // Starts the copies for later steps: with three Q buffers, the Q two steps after `step`.
    __device__ __forceinline__ void load_ahead(BwdStep step) const {
        const BwdStep next = step.next(range);
        if constexpr (C.q_stages > 2) {
            const BwdStep after = next.next(range);
            if (this->exists(after)) this->template load_q<L::kGroupThreads, 0>(after);
        } else {
            if (this->number(step) > 0 && this->exists(next))
                this->template load_q<L::kGroupThreads, 0>(next);
        }
        if constexpr (C.do_stages > 1) {
            if (this->exists(next)) this->template load_do<L::kGroupThreads, 0>(next);
        }
        cp_async_commit();
    }

    template <class Interleave>
    __device__ __forceinline__ void multiply_dv(typename CutDv::Accumulators& dv, BwdStep step,
                                                const Interleave& interleave) const {
        Base::template multiply<CutDv, typename L::POfDv, typename L::DoOfDv, C.tile_m, 1, 2>(
            dv, this->buffer(smem.p), this->do_buffer(step), step.m_block, 0, interleave);
    }

    __device__ __forceinline__ void main_loop() const {
        auto step = [this] { return this->at(0); };
        typename CutDv::Accumulators dv;
        CutDv::clear(dv);
        {
            typename CutS::Accumulators s;
            probabilities(s, step());
            store(s, step().m_block);
        }
        this->step_barrier();
        do {
            load_ahead(step());
            if constexpr (L::kDqFirst > 0) {
                // dQ of the previous step; the first step adds zeros.
                typename CutDq::Accumulators dq;
                const bool first = this->number(step()) == 0;
                if (first) {
                    CutDq::clear(dq);
                } else {
                    this->template multiply_dq<0>(dq, step().m_block);
                }
                named_barrier_arrive(kBarrierDsRead, L::kThreads);
                const BwdStep before = first ? step() : step().previous(range);
                if (!first) this->await_turn(before, 0);
                multiply_dv(dv, step(), this->template dq_adder<0>(dq, before));
            } else {
                multiply_dv(dv, step(), NoInterleave{});
            }
            if constexpr (C.do_stages == 1) named_barrier_arrive(kBarrierDs, L::kThreads);
            if (this->exists(step().next(range))) {
                if constexpr (C.q_stages == 2) {
                    cp_async_wait<0>();
                    named_barrier_sync(kBarrierGroup, L::kGroupThreads);
                }
                const BwdStep next = step().next(range);
                typename CutS::Accumulators s;
                probabilities(s, next);
                named_barrier_sync(kBarrierPRead, L::kThreads);
                store(s, next.m_block);
            } else {
                named_barrier_sync(kBarrierPRead, L::kThreads);
            }
            if constexpr (C.deterministic && L::kDqFirst > 0) {
                if (this->number(step()) > 0) this->end_turn(step().previous(range), 0);
            }
        } while (this->advance(0));
        if constexpr (L::kDqFirst > 0) {
            const BwdStep before = step().previous(range);
            typename CutDq::Accumulators dq;
            this->template multiply_dq<0>(dq, before.m_block);
            this->await_turn(before, 0);
            this->template dq_adder<0>(dq, before).template round<1>(0);
            this->end_turn(before, 0);
        }
        this->template finish<CutDv>(dv, 0, params.dv_accum, params.dv, C.head_dim_v, params.shape.head_dim_v,
                                     1.f);
    }
};

}  // namespace fa::sm80
