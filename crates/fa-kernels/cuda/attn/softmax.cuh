// Online softmax over accumulator fragments: a thread holds two rows, four neighbouring lanes share them.
#pragma once
#include "ptx/math.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

namespace fa {

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, shuffle_xor(x, 1));
    return fmaxf(x, shuffle_xor(x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// How exponentials are computed: with base 2 and the scale folded into one multiply-add, or from scaled
// scores with base e; by the special-function unit with subnormals flushed, or to full f32 accuracy.
enum class Exponential { Base2Approx, Base2, NaturalApprox, Natural };

// The state of a thread's two rows. `max` is the largest exponent so far, scale times the largest score, and
// finite even when no key was seen, so that no difference of infinities arises; `sum` is this thread's share
// until finish(). `scale` turns scores into exponents: of 2 (scale * log2 e) or, for the natural kinds, of e.
// ExpPolyOf16 of every 16 exponentials run on the FMA units; RescaleThreshold > 0 leaves the maximum (and
// with it O and the sum) as it is until it has grown by more than that many powers.
template <int ExpPolyOf16, int RescaleThreshold, Exponential E = Exponential::Base2Approx,
          bool ApproxDivision = false>
struct Softmax {
    static constexpr bool kNatural = E == Exponential::NaturalApprox || E == Exponential::Natural;
    static constexpr float kNothing = -1e38f;  // below every exponent: its difference to any is taken to 0
    static_assert(ExpPolyOf16 == 0 || E == Exponential::Base2Approx, "the polynomial computes powers of 2");

    float max[2] = {kNothing, kNothing};
    float sum[2] = {0.f, 0.f};

    // The exponential of a difference of exponents.
    __device__ __forceinline__ static float exponential(float x) {
        return E == Exponential::Base2Approx ? exp2_approx(x)
               : E == Exponential::Base2     ? exp2f(x)
               : E == Exponential::Natural   ? expf(x)
                                             : exp2_approx(x * kLog2e);
    }

    // With sinks, one more logit in natural units for each row that joins the sum but no output: the first
    // tile's maximum starts from them, and stays below one that is far above every score, so that P is not
    // lost to it. A sink of -inf counts as no sink.
    __device__ __forceinline__ void begin(const float (&sink)[2]) {
        static_assert(!kNatural);
        constexpr float kSinkAbove = 64.f;
#pragma unroll
        for (int row = 0; row < 2; ++row) max[row] = fmaxf(kNothing, sink[row] * kLog2e - kSinkAbove);
    }

    // Adds the sinks after the first step; one lane of the quad counts them.
    __device__ __forceinline__ void add_sinks(const float (&sink)[2], bool counts) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float exponent = fmaf(sink[row], kLog2e, -max[row]);
            sum[row] += exponential(counts ? exponent : minus_infinity());
        }
    }

    // Turns a tile of scores into unnormalised probabilities P, and returns in `rescale` what earlier results
    // must be multiplied with. `First`: nothing came before.
    template <bool First, int N>
    __device__ __forceinline__ void step(float (&s)[N], float scale, float (&rescale)[2]) {
        take_max<First>(s, scale, rescale);
        exponentiate<N>(s, 0, scale);
    }

    // The first half of step(): the maximum alone.
    template <bool First, int N>
    __device__ __forceinline__ void take_max(const float (&s)[N], float scale, float (&rescale)[2]) {
        // Two chains per row: a single one would be bound by the latency of its dependent steps.
        float tile_max[2] = {fmaxf(s[0], s[1]), fmaxf(s[2], s[3])};
        float other_max[2] = {fmaxf(s[4], s[5]), fmaxf(s[6], s[7])};
#pragma unroll
        for (int i = 8; i < N; i += 2) {
            const int row = (i >> 1) & 1;
            tile_max[row] = fmaxf(tile_max[row], s[i]);
            other_max[row] = fmaxf(other_max[row], s[i + 1]);
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float grown = fmaxf(quad_max(fmaxf(tile_max[row], other_max[row])) * scale, max[row]);
            if constexpr (!First && RescaleThreshold > 0) {
                if (grown - max[row] <= float(RescaleThreshold)) grown = max[row];
            }
            rescale[row] = First ? 1.f : exponential(max[row] - grown);
            max[row] = grown;
            if constexpr (!First) sum[row] *= rescale[row];
        }
    }

    // The second half: `Count` scores from `begin` on become P and join the sum. The parts of a tile may come
    // one by one, with matrix products between them.
    template <int Count, int N>
    __device__ __forceinline__ void exponentiate(float (&s)[N], int begin, float scale) {
#pragma unroll
        for (int i = begin; i < begin + Count; ++i) {
            const int row = (i >> 1) & 1;
            // Spread evenly, so that both units always have work.
            const bool polynomial = (i * ExpPolyOf16) % 16 + ExpPolyOf16 > 15;
            // The natural kinds scale first and subtract then; the others do both in one multiply-add.
            const float x = kNatural ? subtract_rounded(multiply_rounded(s[i], scale), max[row])
                                     : fmaf(s[i], scale, -max[row]);
            s[i] = polynomial ? exp2_polynomial(x) : exponential(x);
            sum[row] += s[i];
        }
    }

    // P of `Count` scores from `begin` on against the current maximum; their sums join `block_sum`. The
    // scores stay as they are, for the case that the maximum has been outgrown. `exponent(s, max)` is a
    // score's exponent less the maximum.
    template <int Count, int N, class Exponent>
    __device__ __forceinline__ void exponentials_by_current_max(const float (&s)[N], int begin,
                                                                const Exponent& exponent, float (&p)[Count],
                                                                float (&block_sum)[2]) const {
        static_assert(!kNatural);
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            const int row = ((begin + i) >> 1) & 1;
            const bool polynomial = ((begin + i) * ExpPolyOf16) % 16 + ExpPolyOf16 > 15;
            const float x = exponent(s[begin + i], max[row]);
            // The polynomial's exponent would wrap around; 2^100 is large enough to be noticed.
            p[i] = polynomial ? exp2_polynomial(fminf(x, 100.f)) : exponential(x);
            block_sum[row] += p[i];
        }
    }

    // Whether a probability of the warp's rows may be beyond 2^Threshold (or is infinite, or not a number).
    template <int Threshold>
    __device__ __forceinline__ static bool outgrown(const float (&block_sum)[2]) {
        constexpr float kLimit = 1 << Threshold;
        return warp_any(!(block_sum[0] <= kLimit && block_sum[1] <= kLimit));
    }

    // Completes the sums over the quad; returns in `factor` what O is to be multiplied with and in `lse` the
    // natural logarithm of the sum of exponentials: 0 and -inf for a row that saw nothing.
    __device__ __forceinline__ void finish(float (&factor)[2], float (&lse)[2]) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float total = quad_sum(sum[row]);
            // A row that saw a key sums to 2^-RescaleThreshold at least; hidden keys add at most 2^-126 each
            // (the polynomial).
            const bool empty = total < 1e-30f;
            factor[row] = empty ? 0.f : ApproxDivision ? reciprocal_approx(total) : 1.f / total;
            const float log_sum = kNatural ? max[row] + logf(total) : (max[row] + log2f(total)) * kLn2;
            lse[row] = empty ? minus_infinity() : log_sum;
        }
    }

    // The same with a sink for each row: one more logit, in natural units, that joins the sum but no output.
    // It may be far above every score: the sum is then taken against it. A row that saw nothing has the sink
    // alone; a sink of -inf adds nothing.
    __device__ __forceinline__ void finish(const float (&sink)[2], float (&factor)[2], float (&lse)[2]) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float exponent = kNatural ? sink[row] : sink[row] * kLog2e;
            float total = quad_sum(sum[row]), reference = max[row], shrunk = 1.f;
            if (exponent > reference + 64.f) {
                shrunk = exponential(reference - exponent);
                reference = exponent;
            }
            total = fmaf(total, shrunk, exponential(exponent - reference));
            const bool empty = total < 1e-30f;
            factor[row] = empty ? 0.f : (ApproxDivision ? reciprocal_approx(total) : 1.f / total) * shrunk;
            const float log_sum = kNatural ? reference + logf(total) : (reference + log2f(total)) * kLn2;
            lse[row] = empty ? minus_infinity() : log_sum;
        }
    }
};

template <int N>
__device__ __forceinline__ void scale_rows(float (&o)[N], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < N; ++i) o[i] *= factor[(i >> 1) & 1];
}

}  // namespace fa
