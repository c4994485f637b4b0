// ALiBi: adds -slope * |distance| to the scores, with distance = query + seqlen_k - seqlen_q - key. A query's
// diagonal is the key at distance 0 (bottom-right aligned).
#pragma once
#include "attn/exponent.cuh"
#include "attn/rows.cuh"
#include "attn/seqlen.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/math.cuh"

namespace fa {

// The slope of a query head of sequence `batch` in exponents, of which a natural unit has `unit`. It is
// finite, as 0 * inf is NaN. Under a causal mask a large one is rounded to 16 bits and kept below 2^118: its
// products with distances within a tile are then exact and finite, and alibi_bias() is 0 on the diagonal,
// which every row sees.
template <MaskKind Mask>
__device__ __forceinline__ float alibi_slope(const ModParams& mods, int batch, int head, float unit) {
    const float slope = finite(unit * mods.alibi_slopes[batch * mods.alibi_stride + head]);
    if constexpr (Mask == MaskKind::Causal) {
        constexpr float kLarge = 1024.f, kMost = 3.3e35f;
        if (fabsf(slope) >= kLarge) {
            const float most = slope > kMost ? kMost : slope < -kMost ? -kMost : slope;
            return float_of_bits((bits_of_float(most) + 0x80u) & 0xffffff00u);
        }
    }
    return slope;
}

// The bias at distance `distance + Step * column`. Under a causal mask no visible key is right of the
// diagonal: the distance needs no absolute value, and -slope * distance is the same for all columns.
template <MaskKind Mask, int Step>
__device__ __forceinline__ float alibi_bias(float slope, float distance, int column) {
    if constexpr (Mask == MaskKind::Causal) return fmaf(slope, float(-Step * column), -slope * distance);
    return -slope * fabsf(distance + float(Step * column));
}

// Turns S (products, or capped scores) into biased exponents, s * to_exponent + bias, with slopes in the same
// units. The thread's row r has its diagonal at key diagonal[r]; its first column is key `first_key`.
template <MaskKind Mask, int N>
__device__ __forceinline__ void add_alibi(float (&s)[N], float to_exponent, const float (&slope)[2],
                                          const int (&diagonal)[2], int first_key) {
    const float distance[2] = {float(diagonal[0] - first_key), float(diagonal[1] - first_key)};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int row = (i >> 1) & 1, column = 8 * (i / 4) + (i & 1);
        s[i] = fmaf(s[i], to_exponent, alibi_bias<Mask, -1>(slope[row], distance[row], column));
    }
}

// The same for S^T: the thread's row r is key `first_key` + 8 r, its first column the query whose diagonal is
// at key `diagonal`.
template <MaskKind Mask, int N>
__device__ __forceinline__ void add_alibi_transposed(float (&s)[N], float to_exponent, float slope,
                                                     int diagonal, int first_key) {
    const float distance[2] = {float(diagonal - first_key), float(diagonal - first_key - 8)};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int row = (i >> 1) & 1, column = 8 * (i / 4) + (i & 1);
        s[i] = fmaf(s[i], to_exponent, alibi_bias<Mask, 1>(slope, distance[row], column));
    }
}

// The forward's slopes and diagonals of a thread's two rows of a work tile, `row` and `row` + 8, which belong
// to different heads with PackGqa. Empty without ALiBi.
template <bool Alibi, MaskKind Mask, bool PackGqa>
struct AlibiRows {
    static constexpr int kHeld = PackGqa ? 2 : 1;
    float slope[kHeld];
    int diagonal[kHeld];

    // `unit` is the factor from natural units to exponents.
    template <bool Varied>
    __device__ __forceinline__ AlibiRows(const FwdParams& params, const Seqlen<Varied>& seqlen, int row,
                                         int head, int batch, float unit) {
        const Rows<PackGqa> rows(params.shape);
#pragma unroll
        for (int r = 0; r < kHeld; ++r) {
            diagonal[r] = rows.query(row + 8 * r) + seqlen.k() - seqlen.q();
            slope[r] = alibi_slope<Mask>(params.mods, batch, rows.head(row + 8 * r, head), unit);
        }
    }

    template <int N>
    __device__ __forceinline__ void apply(float (&s)[N], float to_exponent, int first_key) const {
        add_alibi<Mask>(s, to_exponent, {slope[0], slope[kHeld - 1]},
                        {diagonal[0], PackGqa ? diagonal[kHeld - 1] : diagonal[0] + 8}, first_key);
    }
};

template <MaskKind Mask, bool PackGqa>
struct AlibiRows<false, Mask, PackGqa> {
    template <class... Arguments>
    __device__ __forceinline__ AlibiRows(const Arguments&...) {}

    template <int N>
    __device__ __forceinline__ void apply(float (&)[N], float, int) const {}
};

}  // namespace fa
