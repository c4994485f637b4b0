// Masks, changes of scores and weights of probabilities of the caller's own. The unit of a kernel that has
// them defines FA_PROGRAMS and includes the generated mods.cuh first, whose struct Mods is the program. All
// other kernels have none.
#pragma once
#include "config.cuh"
#include "program_params.cuh"
#include "ptx/math.cuh"
#include "types.cuh"

namespace fa {

#ifndef FA_PROGRAMS
// No program. Nothing of it is called.
struct Mods {
    static constexpr bool kMask = false, kScore = false, kAdditive = false;
    struct Row {};
    struct Column {};
    __device__ __forceinline__ Mods(const ProgramParams&, int, int, int, int, int, int) {}
    __device__ __forceinline__ Row row(int) const { return {}; }
    __device__ __forceinline__ Column column(int) const { return {}; }
    __device__ __forceinline__ bool mask(const Row&, const Column&) const { return true; }
    __device__ __forceinline__ float score(float s, const Row&, const Column&) const { return s; }
    __device__ __forceinline__ float weight(const Row&, const Column&) const { return 1.f; }
    __device__ __forceinline__ u32 bits(const Row&, int) const { return 0; }
    __device__ __forceinline__ float weight_of(bool) const { return 1.f; }
    __device__ __forceinline__ float slope(float, const Row&, const Column&) const { return 1.f; }
};
#endif

// Of masks, of changes of scores, and of those whose derivative by the score is not 1.
constexpr bool kMaskProgram = Mods::kMask, kScoreProgram = Mods::kScore;
constexpr bool kScoreSlope = Mods::kScore && !Mods::kAdditive;

// Whether it has weights. Not a constant, which kernels without a program would hold.
template <class M = Mods>
constexpr bool weighs() {
    if constexpr (requires { typename M::Weights; }) {
        return true;
    }
    return false;
}
// Whether they are chosen by bits.
template <class M = Mods>
constexpr bool weighs_by_bits() {
    if constexpr (requires { typename M::WeightsByBits; }) {
        return true;
    }
    return false;
}

// A launch's parameters, with those of its program behind them.
template <class Params>
struct WithPrograms : Params {
    ProgramParams program;
    BlockMapParams map;
    ArrayGradientParams gradients;
};

// The parameters of the program, and of its mask's map. Only kernels that have one call it: theirs lie behind
// the launch's.
template <class Params>
__device__ __forceinline__ const ProgramParams& programs_of(const Params& params) {
    return static_cast<const WithPrograms<Params>&>(params).program;
}
template <class Params>
__device__ __forceinline__ const BlockMapParams& map_of(const Params& params) {
    return static_cast<const WithPrograms<Params>&>(params).map;
}
template <class Params>
__device__ __forceinline__ const ArrayGradientParams& gradients_of(const Params& params) {
    return static_cast<const WithPrograms<Params>&>(params).gradients;
}

// Where a thread's part of a tile of S lies, or with Transposed of S^T. Register i holds row (i / 2) % 2 of
// the thread's two rows, and column 8 * (i / 4) + i % 2 relative to its first (as in mask_scores). Indices
// may lie beyond the sequence, where the results do not count.
template <bool Transposed>
struct ScorePlace {
    int batch, queries, keys, offset;  // its sequence, the lengths of that, and what `off` is
    int group;                         // query heads of a K/V head
    int head[2], query[2];             // of the rows; with Transposed the first are those of the first column
    int key;                           // of the first column; with Transposed of the first row

    __device__ __forceinline__ Mods mods(const ProgramParams& params, int row) const {
        return Mods(params, batch, head[row], head[row] / group, queries, keys, offset);
    }

    // Calls `body` with the register of each score, the program of its head, its row and its column.
    template <int N, class Body>
    __device__ __forceinline__ void for_each(const ProgramParams& params, const Body& body) const {
        const Mods first = mods(params, 0);
        if constexpr (Transposed) {
            const Mods::Column columns[2] = {first.column(key), first.column(key + 8)};
#pragma unroll
            for (int c = 0; c < N / 2; ++c) {
                const Mods::Row row = first.row(query[0] + 8 * (c / 2) + c % 2);
#pragma unroll
                for (int r = 0; r < 2; ++r) body(4 * (c / 2) + 2 * r + c % 2, first, row, columns[r]);
            }
        } else {
            const Mods second = mods(params, 1);
            const Mods::Row rows[2] = {first.row(query[0]), second.row(query[1])};
#pragma unroll
            for (int c = 0; c < N / 2; ++c) {
                const int at = 4 * (c / 2) + c % 2, k = key + 8 * (c / 2) + c % 2;
                body(at, first, rows[0], first.column(k));
                body(at + 2, second, rows[1], second.column(k));
            }
        }
    }
};

// Changes and masks scores. A score program turns products into scores, as exponents of which a natural unit
// has `unit`; those below the range of exponents hide their keys, as -inf does. `masks` where the program
// hides keys of the tile.
template <bool Transposed, int N, class Params>
__device__ __forceinline__ void apply_programs(float (&s)[N], const Params& params,
                                               const ScorePlace<Transposed>& place, float unit, bool masks) {
    const ProgramParams& programs = programs_of(params);
    if constexpr (kScoreProgram) {
        place.template for_each<N>(programs,
                                   [&](int i, const auto& mods, const auto& row, const auto& column) {
                                       s[i] = mods.score(s[i] * params.score.scale, row, column) * unit;
                                   });
    }
    if constexpr (kMaskProgram) {
        if (masks) {
            place.template for_each<N>(programs,
                                       [&](int i, const auto& mods, const auto& row, const auto& column) {
                                           s[i] = mods.mask(row, column) ? s[i] : minus_infinity();
                                       });
        }
    }
}

// The same where weights are chosen by bits of the keys (dropout): 8 keys are read at a time. Tiles begin at
// multiples of 8 keys.
template <bool Transposed, int N>
__device__ __forceinline__ void weigh_by_bits(float (&p)[N], const ProgramParams& programs,
                                              const ScorePlace<Transposed>& place) {
    const int first = place.key & ~7, own = place.key & 7;
    const Mods mods = place.mods(programs, 0);
    if constexpr (Transposed) {
#pragma unroll
        for (int c = 0; c < N / 2; ++c) {
            const Mods::Row row = mods.row(place.query[0] + 8 * (c / 2) + c % 2);
#pragma unroll
            for (int r = 0; r < 2; ++r)
                p[4 * (c / 2) + 2 * r + c % 2] *=
                    mods.weight_of((mods.bits(row, first + 8 * r) >> own & 1) != 0);
        }
    } else {
        const Mods other = place.mods(programs, 1);
        const Mods::Row rows[2] = {mods.row(place.query[0]), other.row(place.query[1])};
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const u32 upper = mods.bits(rows[0], first + 2 * i) >> own;
            const u32 lower = other.bits(rows[1], first + 2 * i) >> own;
            p[i] *= mods.weight_of((upper & 1) != 0);
            p[i + 1] *= mods.weight_of((upper & 2) != 0);
            p[i + 2] *= mods.weight_of((lower & 1) != 0);
            p[i + 3] *= mods.weight_of((lower & 2) != 0);
        }
    }
}

// Multiplies normalised probabilities, or their gradients, by the program's weights.
template <bool Transposed, int N, class Params>
__device__ __forceinline__ void weigh(float (&p)[N], const Params& params,
                                      const ScorePlace<Transposed>& place) {
    const ProgramParams& programs = programs_of(params);
    if constexpr (weighs_by_bits()) {
        weigh_by_bits(p, programs, place);
    } else {
        place.template for_each<N>(programs, [&](int i, const auto& mods, const auto& row,
                                                 const auto& column) { p[i] *= mods.weight(row, column); });
    }
}

// The slopes of the scores that are made of products.
template <bool Transposed, int N, class Params>
__device__ __forceinline__ void slopes_of(float (&slopes)[N], const float (&s)[N], const Params& params,
                                          const ScorePlace<Transposed>& place) {
    place.template for_each<N>(programs_of(params),
                               [&](int i, const auto& mods, const auto& row, const auto& column) {
                                   slopes[i] = mods.slope(s[i] * params.score.scale, row, column);
                               });
}

// The probability of an exponent less that of its row's LSE: at most 1. (LSE of large scores is rounded by
// more than 1.) Rows past the end, whose LSE is +inf, have none.
__device__ __forceinline__ float probability(float exponent, float lse) {
    const float x = exponent - lse;
    return lse == -minus_infinity() ? 0.f : exp2_approx(x > 0.f ? 0.f : x);
}

// A probability times the slope of its score; 0 where there is no probability, whatever the slope.
__device__ __forceinline__ float sloped(float p, float slope) { return p == 0.f ? 0.f : p * slope; }

}  // namespace fa
