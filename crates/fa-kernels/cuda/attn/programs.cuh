// Masks, changes of scores and weights of probabilities of the caller's own. The unit of a kernel that has
// them defines FA_PROGRAMS and includes the generated mods.cuh first, whose struct Mods is the program. All
// other kernels have none.
#pragma once
#include "attn/program.cuh"
#include "config.cuh"
#include "program_params.cuh"
#include "ptx/compiler.cuh"
#include "ptx/math.cuh"
#include "ptx/warp.cuh"
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

// Whether its change of scores hides no key.
template <class M = Mods>
constexpr bool never_hides() {
    if constexpr (requires { typename M::NeverHides; }) {
        return true;
    }
    return false;
}

// Whether its exponent is a product of a number that grows by one along a tile.
template <class M = Mods>
constexpr bool folds_steps() {
    if constexpr (requires(const M& mods) { mods.folds(); }) {
        return true;
    }
    return false;
}

// How the score's program reads an array before the scores are there.
template <class M = Mods>
constexpr AheadForm ahead_form() {
    if constexpr (requires { M::kAhead; }) {
        return M::kAhead;
    }
    return AheadForm::None;
}

// Whether the backward stores dS, which is the gradient of an array that is added to the scores.
constexpr bool stores_scores_gradient() {
#ifdef FA_STORES_GRADIENT
    return true;
#else
    return false;
#endif
}

// A launch's parameters, with those of its program behind them.
template <class Params>
struct WithPrograms : Params {
    ProgramParams program;
    BlockMapParams map;
    ArrayGradientParams gradients;
};

// Those of a backward, with what gradients are stored by behind them.
template <class Params>
struct WithStored : WithPrograms<Params> {
    StoredParams stored;
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
template <class Params>
__device__ __forceinline__ const StoredParams& stored_of(const Params& params) {
    static_assert(sizeof(WithStored<Params>) == sizeof(WithPrograms<Params>) + sizeof(StoredParams));
    return static_cast<const WithStored<Params>&>(params).stored;
}

// Where a thread's part of a tile of S lies, or with Transposed of S^T. Register i holds row (i / 2) % 2 of
// the thread's two rows, and column 8 * (i / 4) + i % 2 relative to its first (as in mask_scores). Indices
// may lie beyond the sequence, where the results do not count. With Packed the rows are of several heads.
template <bool Transposed, bool Packed = false>
struct ScorePlace {
    // Enumerators, which are no symbols of a cubin.
    enum : bool { kTransposed = Transposed, kPacked = Packed };

    int batch, queries, keys, offset;  // its sequence, the lengths of that, and what `off` is
    int group;                         // query heads of a K/V head
    int head[2], query[2];             // of the rows; with Transposed the first are those of the first column
    int key;                           // of the first column; with Transposed of the first row

    // That of the registers from `columns` after the first on.
    __device__ __forceinline__ ScorePlace after(int columns) const {
        ScorePlace place = *this;
        if constexpr (Transposed) {
            place.query[0] += columns;
            place.query[1] += columns;
        } else {
            place.key += columns;
        }
        return place;
    }

    __device__ __forceinline__ Mods mods(const ProgramParams& params, int row) const {
        const int own = row == 0 ? head[0] : head[1];
        return Mods(params, batch, own, own / group, queries, keys, offset);
    }

    // A row (a query), or else a column (a key), of the tile whose first ones these are.
    template <bool IsRow, class M>
    __device__ __forceinline__ auto line_of(const M& mods, int index) const {
        if constexpr (requires { typename M::Counts; }) {
            const int first = Transposed ? query[0] : key;
            constexpr bool kSteps = IsRow == Transposed;
            if constexpr (IsRow) {
                return mods.template row_from<kSteps>(index, first);
            } else {
                return mods.template column_from<kSteps>(index, first);
            }
        } else if constexpr (IsRow) {
            return mods.row(index);
        } else {
            return mods.column(index);
        }
    }

    // Calls `body` with the register of each score, the program of its head, its row and its column.
    template <int N, class Body>
    __device__ __forceinline__ void for_each(const ProgramParams& params, const Body& body) const {
        const Mods first = mods(params, 0);
        if constexpr (Transposed) {
            const Mods::Column columns[2] = {line_of<false>(first, key), line_of<false>(first, key + 8)};
#pragma unroll
            for (int c = 0; c < N / 2; ++c) {
                const Mods::Row row = line_of<true>(first, query[0] + 8 * (c / 2) + c % 2);
#pragma unroll
                for (int r = 0; r < 2; ++r) body(4 * (c / 2) + 2 * r + c % 2, first, row, columns[r]);
            }
        } else {
            const Mods second = mods(params, 1);
            const Mods::Row rows[2] = {line_of<true>(first, query[0]), line_of<true>(second, query[1])};
#pragma unroll
            for (int c = 0; c < N / 2; ++c) {
                const int at = 4 * (c / 2) + c % 2, k = key + 8 * (c / 2) + c % 2;
                body(at, first, rows[0], line_of<false>(first, k));
                body(at + 2, second, rows[1], line_of<false>(second, k));
            }
        }
    }

    // The same of registers [begin, end) in a loop, which needs few registers.
    template <class Body>
    __device__ __forceinline__ void in_turn(const ProgramParams& params, int begin, int end,
                                            const Body& body) const {
#pragma unroll 1
        for (int i = begin; i < end; ++i) {
            const int row = i / 2 % 2, along = i / 4 * 8 + i % 2;
            const Mods own = mods(params, Transposed ? 0 : row);
            if constexpr (Transposed) {
                body(i, own, line_of<true>(own, query[0] + along), line_of<false>(own, key + 8 * row));
            } else {
                body(i, own, line_of<true>(own, row == 0 ? query[0] : query[1]),
                     line_of<false>(own, key + along));
            }
        }
    }
};

// What a program's additive change of a tile of S takes of the thread's two rows: elements that it loads, and
// the rows' heads. It is made before the scores are there.
template <class Place, class M = Mods>
struct RowsAhead {
    Place place;
    M mods[2];
    typename M::Row rows[2];

    __device__ __forceinline__ RowsAhead(const ProgramParams& params, const Place& place)
        : place(place), mods{place.mods(params, 0), place.mods(params, 1)},
          rows{place.template line_of<true>(mods[0], place.query[0]),
               place.template line_of<true>(mods[1], place.query[1])} {}

    // As for_each of the place.
    template <int N, class Body>
    __device__ __forceinline__ void for_each(const Body& body) const {
#pragma unroll
        for (int c = 0; c < N / 2; ++c) {
            const int at = 4 * (c / 2) + c % 2, k = place.key + 8 * (c / 2) + c % 2;
#pragma unroll
            for (int r = 0; r < 2; ++r)
                body(at + 2 * r, mods[r], rows[r], place.template line_of<false>(mods[r], k));
        }
    }
};

struct NoRowsAhead {};

// The numbers from 0 to Count - 1, as a pack.
template <int... I>
struct Numbers {};
template <int Count, int... I>
struct NumbersTo : NumbersTo<Count - 1, Count - 1, I...> {};
template <int... I>
struct NumbersTo<0, I...> {
    using Type = Numbers<I...>;
};
template <int Count>
using Places = typename NumbersTo<Count>::Type;

// The elements of the array that a program reads ahead, for N registers of a tile of S or S^T.
template <class Place, int N, class M = Mods>
struct Ahead {
    // Enumerators, which are no symbols of a cubin. Neighbouring queries are not neighbours in memory, and
    // the rows of several heads share no distances.
    enum : bool {
        kReads = (ahead_form<M>() == AheadForm::Keys && !Place::kTransposed) ||
                 (ahead_form<M>() == AheadForm::Distances && !Place::kPacked),
        kKeys = ahead_form<M>() == AheadForm::Keys
    };

    static constexpr int words() {
        if constexpr (!kReads) {
            return 1;
        } else if constexpr (kKeys) {
            return N * M::kAheadBytes / 4;
        } else {
            return N / 2 + 2;
        }
    }
    u32 words_of[words()];

    __device__ __forceinline__ void read(const ProgramParams& params, const Place& place) {
        if constexpr (kReads) {
            const M first = place.mods(params, 0);
            if constexpr (kKeys) {
                const M second = place.mods(params, 1);
                read_keys(place, first, second, first.row(place.query[0]), second.row(place.query[1]));
            } else {
                read_distances(place, first);
            }
        }
    }

    // The element of register `i`.
    __device__ __forceinline__ float at(int i) const {
        if constexpr (!kKeys) {
            return M::ahead_value(words_of[2 * (i / 4 - i / 2 % 2 + 1) + i % 2]);
        } else if constexpr (M::kAheadBytes == 2) {
            return M::ahead_value(words_of[i / 2] >> (i % 2 * 16));
        } else {
            return M::ahead_value(words_of[i]);
        }
    }

  private:
    __device__ __forceinline__ static u32 element(const ProgramArray& array, i64 offset) {
        if constexpr (M::kAheadBytes == 2) {
            return static_cast<const u16*>(array.data)[offset];
        } else {
            return static_cast<const u32*>(array.data)[offset];
        }
    }

    template <int... I>
    __device__ __forceinline__ void read_pairs(const u8* const (&rows)[2], Numbers<I...>) {
        if constexpr (M::kAheadBytes == 2) {
            ((words_of[I] = load_u32_here<I / 2 * 16>(rows[I % 2])), ...);
        } else {
            (load_u32x2_here<I / 2 * 32>(rows[I % 2], words_of[2 * I], words_of[2 * I + 1]), ...);
        }
    }
    // From 8 places before `own` on, every other time the next and the seventh after it.
    template <int Step, int... I>
    __device__ __forceinline__ void read_line(const u8* own, Numbers<I...>) {
        if constexpr (M::kAheadBytes == 2) {
            ((words_of[I] = load_u16_here<Step * (8 * (I / 2) - 8 + I % 2)>(own)), ...);
        } else {
            ((words_of[I] = load_u32_here<Step * (8 * (I / 2) - 8 + I % 2)>(own)), ...);
        }
    }

    // Two neighbours at a time, where they are neighbours in memory, begin on a multiple of two and are
    // inside for all of the tile.
    template <class Row>
    __device__ __forceinline__ void read_keys(const Place& place, const M& first, const M& second,
                                              const Row& row, const Row& other) {
        constexpr int kAxis = M::kAheadAxis, kBytes = M::kAheadBytes;
        const ProgramArray& array = first.ahead_array();
        const i64 offsets[2] = {first.ahead_offset(row), second.ahead_offset(other)};
        u64 odd = reinterpret_cast<u64>(array.data) / kBytes;
#pragma unroll
        for (int axis = 0; axis < kAxis; ++axis) odd |= array.strides[axis];
        if (odd % 2 == 0 && array.strides[kAxis] == 1 && (place.key & ~7) <= array.extents[kAxis] - 2 * N) {
            const u8* rows[2];
#pragma unroll
            for (int r = 0; r < 2; ++r)
                rows[r] = static_cast<const u8*>(array.data) + (offsets[r] + place.key) * kBytes;
            read_pairs(rows, Places<N / 2>());
        } else {
#pragma unroll
            for (int i = 0; i < N; i += 2) {
                u32 key = place.key + 8 * (i / 4);
                // Few at a time, for want of registers.
                opaque(key);
                const i64 offset = offsets[i / 2 % 2];
                const u32 low = element(array, offset + axis_offset<kAxis>(array, int(key)));
                const u32 high = element(array, offset + axis_offset<kAxis>(array, int(key) + 1));
                if constexpr (kBytes == 2) {
                    words_of[i / 2] = low | high << 16;
                } else {
                    words_of[i] = low;
                    words_of[i + 1] = high;
                }
            }
        }
    }

    // Row + 8 and column + 8 have the distance of row and column: one element for both. They follow one
    // another where the array's elements do and all of a warp's are inside.
    __device__ __forceinline__ void read_distances(const Place& place, const M& mods) {
        constexpr int kAxis = M::kAheadAxis, kBytes = M::kAheadBytes;
        constexpr int kStep = Place::kTransposed ? M::kAheadStep : -M::kAheadStep;
        constexpr int kLast = 2 * N - 7;
        constexpr int kBelow = kStep > 0 ? 8 : kLast, kAbove = kStep > 0 ? kLast : 8;
        const ProgramArray& array = mods.ahead_array();
        const auto row = mods.row(place.query[0]);
        const i64 offset = mods.ahead_offset(row);
        const int index = mods.ahead_index(row, mods.column(place.key));
        const bool inside = index >= kBelow && index < array.extents[kAxis] - kAbove;
        if (array.strides[kAxis] == 1 && !warp_any(!inside)) {
            const u8* own = static_cast<const u8*>(array.data) + (offset + index) * kBytes;
            read_line<kStep * kBytes>(own, Places<words()>());
        } else {
#pragma unroll
            for (int i = 0; i < words(); ++i) {
                const int at = mods_add(index, kStep * (8 * (i / 2) - 8 + i % 2));
                words_of[i] = element(array, offset + axis_offset<kAxis>(array, at));
            }
        }
    }
};

// Turns products into scores, as exponents of which a natural unit has `unit`: finite where scores are, as
// -inf alone hides a key. `scores`: the factors of the products.
template <int N, class Params, class Place, class Read>
__device__ __forceinline__ void change_scores(float (&s)[N], const Params& params, const ScoreParams& scores,
                                              const Place& place, const Read& ahead, float unit) {
    place.template for_each<N>(programs_of(params),
                               [&](int i, const auto& mods, const auto& row, const auto& column) {
                                   const float product = s[i] * scores.scale;
                                   float score;
                                   if constexpr (Read::kReads) {
                                       score = mods.score(product, row, column, ahead.at(i));
                                   } else {
                                       score = mods.score(product, row, column);
                                   }
                                   s[i] = multiply_towards_zero(score, unit);
                               });
}

// The same to exponents of 2.
template <int N, class Params, class Place, class Read, class M = Mods>
__device__ __forceinline__ void to_exponents(float (&s)[N], const Params& params, const ScoreParams& scores,
                                             const Place& place, const Read& ahead) {
    if constexpr (folds_steps<M>()) {
        const ProgramParams& programs = programs_of(params);
        const bool folds = place.mods(programs, 0).folds() && place.mods(programs, 1).folds();
        if (!warp_any(!folds)) {
            place.template for_each<N>(
                programs, [&](int i, const auto& mods, const auto& row, const auto& column) {
                    const float added = mods.template folded<Place::kTransposed>(row, column);
                    s[i] = fmaf(s[i], scores.scale_log2, added);
                });
            return;
        }
    }
    if constexpr (M::kScore && M::kAdditive) {
        place.template for_each<N>(programs_of(params),
                                   [&](int i, const auto& mods, const auto& row, const auto& column) {
                                       if constexpr (Read::kReads) {
                                           const float added = mods.exponent(row, column, ahead.at(i));
                                           s[i] = fmaf(s[i], scores.scale_log2, added);
                                       } else {
                                           const float added = mods.exponent(row, column);
                                           s[i] = fmaf(s[i], scores.scale_log2, added);
                                       }
                                   });
    } else if constexpr (M::kScore) {
        change_scores(s, params, scores, place, ahead, kLog2e);
    }
}

// The same of an additive change of which nothing is read ahead but what its rows are.
template <int N, class Place, class M>
__device__ __forceinline__ void to_exponents(float (&s)[N], const ScoreParams& scores,
                                             const RowsAhead<Place, M>& rows) {
    if constexpr (folds_steps<M>()) {
        if (!warp_any(!(rows.mods[0].folds() && rows.mods[1].folds()))) {
            rows.template for_each<N>([&](int i, const auto& mods, const auto& row, const auto& column) {
                s[i] = fmaf(s[i], scores.scale_log2, mods.template folded<false>(row, column));
            });
            return;
        }
    }
    rows.template for_each<N>([&](int i, const auto& mods, const auto& row, const auto& column) {
        s[i] = fmaf(s[i], scores.scale_log2, mods.exponent(row, column));
    });
}

// Changes scores, and hides keys where `masks`: where the program hides keys of the tile.
template <int N, class Params, class Place>
__device__ __forceinline__ void apply_programs(float (&s)[N], const Params& params, const ScoreParams& scores,
                                               const Place& place, const Ahead<Place, N>& ahead, float unit,
                                               bool masks) {
    if constexpr (kScoreProgram) change_scores(s, params, scores, place, ahead, unit);
    if constexpr (kMaskProgram) {
        if (masks) {
            place.template for_each<N>(programs_of(params),
                                       [&](int i, const auto& mods, const auto& row, const auto& column) {
                                           s[i] = mods.mask(row, column) ? s[i] : minus_infinity();
                                       });
        }
    }
}

// The most registers up to 20 of which N are a multiple, by columns.
template <int N>
constexpr int part_of() {
    int most = 4;
    for (int part = 4; part <= 20; part += 4) most = N % part == 0 ? part : most;
    return most;
}

// The same without anything read ahead: elements are read for a part of the registers at a time.
template <int N, class Params, class Place>
__device__ __forceinline__ void apply_programs(float (&s)[N], const Params& params, const ScoreParams& scores,
                                               const Place& place, float unit, bool masks) {
    constexpr int kPart = Ahead<Place, N>::kReads ? part_of<N>() : N;
#pragma unroll
    for (int begin = 0; begin < N; begin += kPart) {
        const Place own = place.after(2 * begin);
        Ahead<Place, kPart> ahead;
        ahead.read(programs_of(params), own);
        float part[kPart];
#pragma unroll
        for (int i = 0; i < kPart; ++i) part[i] = s[begin + i];
        apply_programs(part, params, scores, own, ahead, unit, masks);
#pragma unroll
        for (int i = 0; i < kPart; ++i) s[begin + i] = part[i];
    }
}

// to_exponents() without anything read ahead.
template <int N, class Params, class Place>
__device__ __forceinline__ void to_exponents(float (&s)[N], const Params& params, const ScoreParams& scores,
                                             const Place& place) {
    constexpr int kPart = Ahead<Place, N>::kReads ? part_of<N>() : N;
#pragma unroll
    for (int begin = 0; begin < N; begin += kPart) {
        const Place own = place.after(2 * begin);
        Ahead<Place, kPart> ahead;
        ahead.read(programs_of(params), own);
        float part[kPart];
#pragma unroll
        for (int i = 0; i < kPart; ++i) part[i] = s[begin + i];
        to_exponents(part, params, scores, own, ahead);
#pragma unroll
        for (int i = 0; i < kPart; ++i) s[begin + i] = part[i];
    }
}

// The same where weights are chosen by bits of the keys (dropout): 8 keys are read at a time. Tiles begin at
// multiples of 8 keys.
template <bool Transposed, bool Packed, int N>
__device__ __forceinline__ void weigh_by_bits(float (&p)[N], const ProgramParams& programs,
                                              const ScorePlace<Transposed, Packed>& place) {
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
template <int N, class Params, class Place>
__device__ __forceinline__ void weigh(float (&p)[N], const Params& params, const Place& place) {
    const ProgramParams& programs = programs_of(params);
    if constexpr (weighs_by_bits()) {
        weigh_by_bits(p, programs, place);
    } else {
        place.template for_each<N>(programs, [&](int i, const auto& mods, const auto& row,
                                                 const auto& column) { p[i] *= mods.weight(row, column); });
    }
}

// The slopes of the scores that are made of products.
template <int N, class Params, class Place>
__device__ __forceinline__ void slopes_of(float (&slopes)[N], const float (&s)[N], const Params& params,
                                          const Place& place) {
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
