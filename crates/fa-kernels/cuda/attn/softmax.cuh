// Online softmax over accumulator fragments: a thread holds parts of two rows, a quad of lanes whole rows.
#pragma once
#include "attn/exponent.cuh"
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

// The state of a thread's two rows. `max` is the largest exponent so far (scale times the largest score); it
// is finite even if no key was seen, so that no difference of infinities arises. `sum` is this thread's part
// of the row sum until finish(). `scale` turns scores into exponents: of 2 (scale * log2 e), or of e for the
// natural kinds. ExpPolyOf16 of every 16 exponentials run on the FMA units. With RescaleThreshold > 0 the
// maximum (and so O and the sum) is kept until an exponent exceeds it by more than that. `max` is Offset less
// than the largest exponent: P, and the sum with it, are 2^Offset times as large.
template <int ExpPolyOf16, int RescaleThreshold, Exponential E = Exponential::Base2Approx,
          bool ApproxDivision = false, int Offset = 0>
struct Softmax {
    static constexpr bool kNatural = E == Exponential::NaturalApprox || E == Exponential::Natural;
    static constexpr float kNothing = -kLargest;  // no exponent is below: larger ones raise it
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

    // Initialises the rows with sinks: a sink is one more logit per row, in natural units, that joins the sum
    // but not the output. The maximum starts from the sinks, but stays below a sink far above every score, so
    // that P does not underflow. A sink of -inf counts as none.
    __device__ __forceinline__ void begin(const float (&sink)[2]) {
        static_assert(!kNatural);
        constexpr float kSinkAbove = 64.f;
#pragma unroll
        for (int row = 0; row < 2; ++row) max[row] = fmaxf(kNothing, sink_exponent(sink[row]) - kSinkAbove);
    }

    // Adds the sinks to the sum after the first step; `counts` is true in one lane of the quad.
    __device__ __forceinline__ void add_sinks(const float (&sink)[2], bool counts) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float exponent = sink_exponent(sink[row]) - max[row];
            sum[row] += exponential(counts ? exponent : minus_infinity());
        }
    }

    // Turns a tile of scores into unnormalised probabilities P, and returns in `rescale` the factor for
    // earlier results (O and the sum). `First`: there are none.
    template <bool First, int N>
    __device__ __forceinline__ void step(float (&s)[N], float scale, float (&rescale)[2]) {
        take_max<First>(s, scale, rescale);
        exponentiate<N>(s, 0, scale);
    }

    // The first half of step(): updates the maximum.
    template <bool First, int N>
    __device__ __forceinline__ void take_max(const float (&s)[N], float scale, float (&rescale)[2]) {
        // Two chains per row: a single one would be bound by latency.
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
            float grown = quad_max(fmaxf(tile_max[row], other_max[row])) * scale;
            if constexpr (Offset != 0) grown -= float(Offset);
            grown = fmaxf(grown, max[row]);
            if constexpr (!First && RescaleThreshold > 0) {
                if (grown - max[row] <= float(RescaleThreshold)) grown = max[row];
            }
            rescale[row] = First ? 1.f : exponential(max[row] - grown);
            max[row] = grown;
            if constexpr (!First) sum[row] *= rescale[row];
        }
    }

    // The second half: turns `Count` scores from `begin` on into P and adds them to the sum. A tile may be
    // done in parts, with matrix products between them.
    template <int Count, int N>
    __device__ __forceinline__ void exponentiate(float (&s)[N], int begin, float scale) {
#pragma unroll
        for (int i = begin; i < begin + Count; ++i) {
            const int row = (i >> 1) & 1;
            // Spread evenly, so that both units always have work.
            const bool polynomial = (i * ExpPolyOf16) % 16 + ExpPolyOf16 > 15;
            // The natural kinds scale, then subtract; the others do both in one FMA.
            const float x = kNatural ? subtract_rounded(multiply_rounded(s[i], scale), max[row])
                                     : fmaf(s[i], scale, -max[row]);
            s[i] = polynomial ? exp2_polynomial(x) : exponential(x);
            sum[row] += s[i];
        }
    }

    // Computes P of `Count` scores from `begin` on against the current maximum and adds it to `block_sum`.
    // The scores are kept in case they have outgrown the maximum. `exponent(s, max)` is a score's exponent
    // less the maximum.
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
            // Clamped, since the polynomial's exponent would wrap around; 2^100 still exceeds any threshold.
            p[i] = polynomial ? exp2_polynomial(fminf(x, 100.f)) : exponential(x);
            block_sum[row] += p[i];
        }
    }

    // Whether a probability in the warp's rows may exceed 2^Threshold (or is infinite or NaN).
    template <int Threshold>
    __device__ __forceinline__ static bool outgrown(const float (&block_sum)[2]) {
        constexpr float kLimit = 1 << Threshold;
        return warp_any(!(block_sum[0] <= kLimit && block_sum[1] <= kLimit));
    }

    // Whether a row with this sum saw no key. One that saw a key has a sum of at least 2^-RescaleThreshold;
    // masked keys add at most 2^-126 each (by the polynomial).
    __device__ __forceinline__ static bool is_empty(float total) { return total < 1e-30f; }

    // Completes the row sums over the quad. Returns the factor that normalises O, and the LSE (natural
    // logarithm): 0 and -inf for a row that saw no key.
    __device__ __forceinline__ void finish(float (&factor)[2], float (&lse)[2]) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float total = quad_sum(sum[row]);
            const bool empty = is_empty(total);
            factor[row] = empty ? 0.f : ApproxDivision ? reciprocal_approx(total) : 1.f / total;
            const float log_sum = kNatural ? max[row] + logf(total) : (max[row] + log2f(total)) * kLn2;
            lse[row] = empty ? minus_infinity() : log_sum;
            sum[row] = total;
        }
    }

    // After finish(), the LSE of rows of which every exponent is the lowest number, as those of lower scores
    // are: as low.
    __device__ __forceinline__ static void keep_lowest(float (&lse)[2]) {
        if constexpr (!kNatural) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const bool is_lowest = lse[row] >= kNothing && lse[row] < kNothing * (kLn2 * 0.9999f);
                lse[row] = is_lowest ? kNothing : lse[row];
            }
        }
    }

    // After finish(), whether an LSE is too large for its exponent to tell what it is relative to a sink.
    __device__ __forceinline__ static bool is_beyond_sinks(const float (&lse)[2]) {
        constexpr float kLarge = 65536.f;
        return !(fabsf(lse[0]) < kLarge && fabsf(lse[1]) < kLarge);
    }

    // After finish(), the LSE of rows whose sums include these sinks, relative to them.
    __device__ __forceinline__ void relate_to_sinks(const float (&sink)[2], float (&lse)[2]) const {
        static_assert(!kNatural);
#pragma unroll
        for (int row = 0; row < 2; ++row)
            lse[row] = is_empty(sum[row]) ? sink[row] : lse_with_sink(sink[row], max[row], sum[row]);
    }

    // finish() with a sink per row: a logit, in natural units, that joins the sum but not the output. If it
    // is far above every score, the sum is taken against it. A row that saw no key has the sink alone, which
    // is its LSE; a sink of -inf adds nothing.
    __device__ __forceinline__ void finish(const float (&sink)[2], float (&factor)[2], float (&lse)[2]) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float exponent = kNatural ? sink[row] : sink_exponent(sink[row]);
            float total = quad_sum(sum[row]), reference = max[row], shrunk = 1.f;
            if (exponent > reference + 64.f) {
                shrunk = exponential(reference - exponent);
                reference = exponent;
            }
            total = fmaf(total, shrunk, exponential(exponent - reference));
            const bool empty = is_empty(total);
            factor[row] = empty ? 0.f : (ApproxDivision ? reciprocal_approx(total) : 1.f / total) * shrunk;
            const float log_sum =
                kNatural ? reference + logf(total) : lse_with_sink(sink[row], reference, total);
            lse[row] = empty ? sink[row] : log_sum;
        }
    }
};

// Multiplies the thread's two rows of O by `factor`.
template <int N>
__device__ __forceinline__ void scale_rows(float (&o)[N], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < N; ++i) o[i] *= factor[(i >> 1) & 1];
}

}  // namespace fa
