// The dS warps of the SM80-class backward: dS = P (dP - dPsum), dK, and the second part of dQ.
#pragma once
#include "attn/programs.cuh"
#include "config.cuh"
#include "ptx/address.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "sm80/bwd_group.cuh"
#include "sm80/bwd_layout.cuh"

namespace fa::sm80 {

template <Sm80BwdConfig C>
struct DsWarps : BwdGroup<C> {
    using Base = BwdGroup<C>;
    using L = BwdLayout<C>;
    using CutS = typename L::CutS;
    using CutDk = typename L::CutDk;
    using CutDq = typename L::template CutDq<1>;
    using Base::params, Base::range, Base::smem, Base::tile;
    using typename Base::Here;
    using typename Base::Stats;
    static constexpr int kFirstThread = L::kGroupThreads;

    // Computes dS = P (dP - dPsum). P was written, rounded, by the thread at the same position of the P
    // warps.
    __device__ __forceinline__ void differentiate(const typename CutS::Accumulators& dp, BwdStep step) const {
        const Here place(step.m_block);
        constexpr int kRounds = CutS::kRegisters / 4;
        u32 p[CutS::kFragments][2];
        constexpr u32 kDsFromP = L::Pds::kBytes;  // ds follows p in BwdStorage
        const u32 of_p = this->buffer(smem.p[kSlopedP<C>]);
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            const u32 at = Base::words_at(of_p, 4 * round, place);
#pragma unroll
            for (int f = 0; f < CutS::kFragments; ++f) {
                p[f][0] = load_shared_u32(at + f * Base::kFragmentBytes);
                p[f][1] = load_shared_u32(at + f * Base::kFragmentBytes + Base::kLowerBytes);
            }
#pragma unroll
            for (int f = 0; f < CutS::kFragments; ++f) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const u32 pair = p[f][r];
                    const float* of = dp[f] + 4 * round + 2 * r;
                    float low = unpack_low<C.dtype>(pair) * of[0], high = unpack_high<C.dtype>(pair) * of[1];
                    if constexpr (kMaskProgram || kScoreProgram) {
                        low = unpack_low<C.dtype>(pair) == 0.f ? 0.f : low;
                        high = unpack_high<C.dtype>(pair) == 0.f ? 0.f : high;
                    }
                    store_shared_u32(at + kDsFromP + f * Base::kFragmentBytes + r * Base::kLowerBytes,
                                     pack<C.dtype>(low, high));
                }
            }
        }
    }

    // Weights dP, then subtracts dPsum.
    __device__ __forceinline__ void subtract_weighed(typename CutS::Accumulators& dp, BwdStep step) const {
        Stats dpsum;
        this->read_stats(dpsum, this->dpsum_buffer(step), step);
#pragma unroll
        for (int f = 0; f < CutS::kFragments; ++f) {
            weigh(dp[f], params, this->score_place(step, f));
#pragma unroll
            for (int i = 0; i < CutS::kRegisters; ++i) dp[f][i] -= dpsum[f][i >> 1 & 1];
        }
    }

    __device__ __forceinline__ void main_loop() const {
        auto step = [this] { return this->at(1); };
        typename CutDk::Accumulators dk;
        CutDk::clear(dk);
        this->step_barrier();
        do {
            {
                typename CutS::Accumulators dp;
                Stats dpsum;
                this->read_stats(dpsum, this->dpsum_buffer(step()), step());
#pragma unroll
                for (int f = 0; f < CutS::kFragments; ++f) {
#pragma unroll
                    for (int i = 0; i < CutS::kRegisters; ++i)
                        dp[f][i] = weighs() ? 0.f : -dpsum[f][i >> 1 & 1];
                }
                Base::template multiply<CutS, typename L::DoOfDp, typename L::VOfDp, C.head_dim_v,
                                        Base::kAheadA, 2>(dp, this->do_buffer(step()), this->buffer(smem.v),
                                                          step().m_block);
                if constexpr (weighs()) subtract_weighed(dp, step());
                if constexpr (L::kDqFirst > 0) named_barrier_sync(kBarrierDsRead, L::kThreads);
                differentiate(dp, step());
            }
            named_barrier_sync(kBarrierDs, C.do_stages == 1 ? L::kThreads : L::kGroupThreads);
            // Arrives here and not right after reading P: compute-sanitizer's racecheck considers a thread's
            // reads finished when it waits at a barrier, not when it arrives.
            named_barrier_arrive(kBarrierPRead, L::kThreads);
            if constexpr (C.do_stages == 1) {
                const BwdStep next = step().next(range);
                if (this->exists(next)) this->template load_do<L::kGroupThreads, kFirstThread>(next);
                cp_async_commit();
            }
            if constexpr (C.deterministic) {
                if (this->number(step()) > 0) this->end_turn(step().previous(range), 1);
            }
            typename CutDq::Accumulators dq;
            this->template multiply_dq<1>(dq, step().m_block);
            this->await_turn(step(), 1);
            Base::template multiply<CutDk, typename L::DsOfDk, typename L::QOfDk, C.tile_m, 1, 2>(
                dk, this->buffer(smem.ds), this->q_buffer(step()), step().m_block, 0,
                this->template dq_adder<1>(dq, step()));
        } while (this->advance(1));
        if constexpr (C.deterministic) this->end_turn(step().previous(range), 1);
        this->template finish<CutDk>(dk, 1, params.dk_accum, params.dk, C.head_dim, params.shape.head_dim,
                                     params.score.scale);
    }
};

}  // namespace fa::sm80
