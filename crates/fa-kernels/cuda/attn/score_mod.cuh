// Score modifiers, applied between Q K^T and the mask: the soft cap, cap * tanh(scale * s / cap), or none.
#pragma once
#include "params.cuh"
#include "ptx/math.cuh"
#include "types.cuh"

namespace fa {

template <bool Softcap>
struct ScoreMod {
    const ScoreParams& params;

    // The factor from modified scores to exponents of 2, and of e.
    __device__ __forceinline__ float to_log2() const { return Softcap ? kLog2e : params.scale_log2; }
    __device__ __forceinline__ float to_natural() const { return Softcap ? 1.f : params.scale; }

    // Turns products into scores, in place. tanh(x) = 1 - 2 / (1 + e^2x): tanh.approx is too inaccurate for
    // f16.
    template <int N>
    __device__ __forceinline__ void apply(float (&s)[N]) const {
        if constexpr (Softcap) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float e = exp2_approx(s[i] * params.softcap_exponent);
                s[i] = fmaf(-2.f * params.softcap, reciprocal_approx(1.f + e), params.softcap);
            }
        }
    }

    // A product's capped exponent of 2, less `max`, where its score is at most half the cap. For other scores
    // it sets the sign bit of `beyond`, and the result is meaningless. Uses the FMA units alone; accurate to
    // 1.5e-5 at a cap of 50.
    __device__ __forceinline__ float near_exponent(float s, float max, u32& beyond) const {
        const float v = fmaf(-s, s, params.softcap_near);
        beyond |= bits_of_float(v);
        float factor = fmaf(params.softcap_term_3, v, params.softcap_term_2);
        factor = fmaf(factor, v, params.softcap_term_1);
        factor = fmaf(factor, v, params.softcap_term_0);
        return fmaf(s, factor, -max);
    }

    // Turns products into shares of the cap, tanh(scale * s / cap), in place.
    template <int N>
    __device__ __forceinline__ void apply_as_shares(float (&s)[N]) const {
        if constexpr (Softcap) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                s[i] = fmaf(-2.f, reciprocal_approx(1.f + exp2_approx(s[i] * params.softcap_exponent)), 1.f);
            }
        }
    }
    // The factor from shares of the cap to exponents of 2.
    __device__ __forceinline__ float shares_to_log2() const {
        return Softcap ? params.softcap_log2 : params.scale_log2;
    }

    // The derivative of the cap at a share, by which dS is multiplied; 0 at -inf, the share of a masked
    // score.
    __device__ __forceinline__ static float slope(float share) {
        return fmaxf(fmaf(-share, share, 1.f), 0.f);
    }

    // The same from the probability `p`, which is not 0, and the row's LSE in base 2, where the score itself
    // is gone.
    __device__ __forceinline__ float slope(float p, float lse_log2) const {
        const float share = (log2_approx(p) + lse_log2) * params.softcap_share;
        return fmaf(-share, share, 1.f);
    }
};

}  // namespace fa
