// Ranges of values over a tile of queries and keys, and what each operation of a program makes of them: never
// too narrow. The twin of fa-core's `program/spans.rs`, by which the header of a mask says which tiles are
// empty and which full.
#pragma once
#include "attn/program.cuh"

namespace fa {

// Integers from low to high.
struct IntSpan {
    i64 low, high;
};
// Numbers from low to high, and NaN if so.
struct FloatSpan {
    float low, high;
    bool nan;
};
// Whether it may be true, and whether it may be false.
struct TruthSpan {
    bool yes, no;
};

// What a tile has to see of a mask: whether a query may see a key, and whether every query sees every key.
struct TileState {
    bool visible, full;
};

// Elements of an array that a tile looks at; of larger parts it knows the type alone.
constexpr i64 kMostScanned = 4096;

// Those of them whose loads are in flight together.
constexpr int kScannedAtOnce = 8;

// More than kernels and these functions round together, and than what is flushed to 0.
constexpr float kSpanRelative = 1e-4f;
constexpr float kSpanAbsolute = 1e-6f;

constexpr i64 kLowestInt = -2147483648ll;
constexpr i64 kHighestInt = 2147483647ll;

__device__ __forceinline__ float span_infinity() { return -minus_infinity(); }
__device__ __forceinline__ IntSpan any_int() { return {kLowestInt, kHighestInt}; }
__device__ __forceinline__ FloatSpan any_float() { return {minus_infinity(), span_infinity(), true}; }

__device__ __forceinline__ IntSpan span_of(int x) { return {x, x}; }
__device__ __forceinline__ FloatSpan span_of(float x) {
    return x != x ? any_float() : FloatSpan{x, x, false};
}
__device__ __forceinline__ TruthSpan span_of(bool x) { return {x, !x}; }

__device__ __forceinline__ IntSpan span_or(IntSpan a, IntSpan b) {
    return {min_of(a.low, b.low), max_of(a.high, b.high)};
}
__device__ __forceinline__ FloatSpan span_or(FloatSpan a, FloatSpan b) {
    return {min_of(a.low, b.low), max_of(a.high, b.high), a.nan || b.nan};
}
__device__ __forceinline__ TruthSpan span_or(TruthSpan a, TruthSpan b) {
    return {a.yes || b.yes, a.no || b.no};
}

template <class Span>
__device__ __forceinline__ Span span_select(TruthSpan condition, Span yes, Span no) {
    return !condition.no ? yes : !condition.yes ? no : span_or(yes, no);
}

// Integers, or any if they leave i32.
__device__ __forceinline__ IntSpan ints(i64 low, i64 high) {
    return low < kLowestInt || high > kHighestInt ? any_int() : IntSpan{low, high};
}
__device__ __forceinline__ bool is_one(IntSpan x) { return x.low == x.high; }

// Numbers, widened; any if an end is not a number.
__device__ __forceinline__ FloatSpan floats(float low, float high, bool nan) {
    if (low != low || high != high) return any_float();
    const float wide_low = abs_of(low) <= kLargest ? low - abs_of(low) * kSpanRelative - kSpanAbsolute : low;
    const float wide_high =
        abs_of(high) <= kLargest ? high + abs_of(high) * kSpanRelative + kSpanAbsolute : high;
    return {min_of(wide_low, kLargest), max_of(wide_high, -kLargest), nan};
}
// Without what no rounding leads to.
__device__ __forceinline__ FloatSpan not_negative(FloatSpan x) {
    return x.nan && x.low < 0.f ? x : FloatSpan{max_of(x.low, 0.f), max_of(x.high, 0.f), x.nan};
}

__device__ __forceinline__ TruthSpan span_not(TruthSpan x) { return {x.no, x.yes}; }
__device__ __forceinline__ IntSpan span_not(IntSpan x) { return {~x.high, ~x.low}; }
__device__ __forceinline__ IntSpan span_negate(IntSpan x) { return ints(-x.high, -x.low); }
__device__ __forceinline__ FloatSpan span_negate(FloatSpan x) { return {-x.high, -x.low, x.nan}; }
__device__ __forceinline__ IntSpan span_abs(IntSpan x) {
    if (x.low >= 0) return x;
    return x.high <= 0 ? ints(-x.high, -x.low) : ints(0, max_of(x.high, -x.low));
}
__device__ __forceinline__ FloatSpan span_abs(FloatSpan x) {
    if (x.low >= 0.f) return x;
    return x.high <= 0.f ? FloatSpan{-x.high, -x.low, x.nan} : FloatSpan{0.f, max_of(x.high, -x.low), x.nan};
}
__device__ __forceinline__ FloatSpan span_floor(FloatSpan x) {
    return {floor_of(x.low), floor_of(x.high), x.nan};
}
__device__ __forceinline__ IntSpan span_int(FloatSpan x) {
    const i64 low = int_of_float(x.low), high = int_of_float(x.high);
    return x.nan ? IntSpan{min_of<i64>(low, 0), max_of<i64>(high, 0)} : IntSpan{low, high};
}
__device__ __forceinline__ IntSpan span_int(TruthSpan x) { return {x.no ? 0 : 1, x.yes ? 1 : 0}; }
__device__ __forceinline__ FloatSpan span_float(TruthSpan x) {
    return {x.no ? 0.f : 1.f, x.yes ? 1.f : 0.f, false};
}
// Within 2^24 integers are numbers; beyond, they are rounded.
__device__ __forceinline__ FloatSpan span_float(IntSpan x) {
    const float low = static_cast<float>(x.low), high = static_cast<float>(x.high);
    return x.low >= -(1 << 24) && x.high <= 1 << 24 ? FloatSpan{low, high, false} : floats(low, high, false);
}
__device__ __forceinline__ FloatSpan span_exp(FloatSpan x) {
    return not_negative(floats(mods_exp(x.low), mods_exp(x.high), x.nan));
}
__device__ __forceinline__ FloatSpan span_exp2(FloatSpan x) {
    return not_negative(floats(exp2_approx(x.low), exp2_approx(x.high), x.nan));
}
__device__ __forceinline__ FloatSpan span_tanh(FloatSpan x) {
    return floats(mods_tanh(x.low), mods_tanh(x.high), x.nan);
}
__device__ __forceinline__ FloatSpan span_sigmoid(FloatSpan x) {
    return not_negative(floats(mods_sigmoid(x.low), mods_sigmoid(x.high), x.nan));
}
__device__ __forceinline__ FloatSpan span_log(FloatSpan x) {
    const float low = x.low < 1e-37f ? minus_infinity() : mods_log(x.low);
    return floats(low, mods_log(max_of(x.high, kSpanAbsolute)), x.nan || x.low < 0.f);
}
__device__ __forceinline__ FloatSpan span_log2(FloatSpan x) {
    const float low = x.low < 1e-37f ? minus_infinity() : log2_approx(x.low);
    return floats(low, log2_approx(max_of(x.high, kSpanAbsolute)), x.nan || x.low < 0.f);
}
__device__ __forceinline__ FloatSpan span_sqrt(FloatSpan x) {
    const float low = sqrt_approx(max_of(x.low, 0.f)), high = sqrt_approx(max_of(x.high, 0.f));
    return not_negative(floats(low, high, x.nan || x.low < 0.f));
}
__device__ __forceinline__ FloatSpan span_rsqrt(FloatSpan x) {
    const float high = x.low < 1e-37f ? span_infinity() : rsqrt_approx(x.low);
    const float low = x.high < 1e-37f ? span_infinity() : rsqrt_approx(x.high);
    return not_negative(floats(low, high, x.nan || x.low < 0.f));
}
__device__ __forceinline__ FloatSpan span_wave(FloatSpan x) {
    return {-1.001f, 1.001f, x.nan || abs_of(x.low) > kLargest || abs_of(x.high) > kLargest};
}

__device__ __forceinline__ TruthSpan span_and(TruthSpan a, TruthSpan b) {
    return {a.yes && b.yes, a.no || b.no};
}
__device__ __forceinline__ TruthSpan span_or_both(TruthSpan a, TruthSpan b) {
    return {a.yes || b.yes, a.no && b.no};
}
__device__ __forceinline__ TruthSpan span_xor(TruthSpan a, TruthSpan b) {
    return {(a.yes && b.no) || (a.no && b.yes), (a.yes && b.yes) || (a.no && b.no)};
}

__device__ __forceinline__ IntSpan around(i64 a, i64 b, i64 c, i64 d) {
    return ints(min_of(min_of(a, b), min_of(c, d)), max_of(max_of(a, b), max_of(c, d)));
}
__device__ __forceinline__ i64 floor_of_ratio(i64 a, i64 b) { return a / b - (a % b < 0 ? 1 : 0); }

__device__ __forceinline__ IntSpan span_add(IntSpan a, IntSpan b) {
    return ints(a.low + b.low, a.high + b.high);
}
__device__ __forceinline__ IntSpan span_subtract(IntSpan a, IntSpan b) {
    return ints(a.low - b.high, a.high - b.low);
}
__device__ __forceinline__ IntSpan span_multiply(IntSpan a, IntSpan b) {
    return around(a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high);
}
__device__ __forceinline__ IntSpan span_floor_divide(IntSpan a, IntSpan b) {
    const i64 low = max_of<i64>(b.low, 1), high = max_of<i64>(b.high, 1);
    return around(floor_of_ratio(a.low, low), floor_of_ratio(a.low, high), floor_of_ratio(a.high, low),
                  floor_of_ratio(a.high, high));
}
// Exact within one period.
__device__ __forceinline__ IntSpan within_period(IntSpan x, i64 divisor) {
    const i64 period = floor_of_ratio(x.low, divisor);
    if (period != floor_of_ratio(x.high, divisor)) return {0, divisor - 1};
    return {x.low - period * divisor, x.high - period * divisor};
}
__device__ __forceinline__ IntSpan span_floor_modulo(IntSpan a, IntSpan b) {
    return is_one(b) ? within_period(a, max_of<i64>(b.low, 1)) : IntSpan{0, max_of<i64>(b.high, 1) - 1};
}
__device__ __forceinline__ IntSpan span_shift_left(IntSpan a, IntSpan b) {
    if (!is_one(b)) return any_int();
    if (b.low < 0 || b.low > 31) return {0, 0};
    return ints(a.low * (1ll << b.low), a.high * (1ll << b.low));
}
__device__ __forceinline__ IntSpan span_shift_right(IntSpan a, IntSpan b) {
    if (!is_one(b)) return {min_of<i64>(a.low, 0), max_of<i64>(a.high, a.low < 0 ? -1 : 0)};
    const i64 by = b.low < 0 || b.low > 31 ? 31 : b.low;
    return {a.low >> by, a.high >> by};
}
__device__ __forceinline__ IntSpan span_and(IntSpan a, IntSpan b) {
    if (is_one(a) && is_one(b)) return {a.low & b.low, a.low & b.low};
    if (is_one(b) && b.low >= 0 && (b.low & (b.low + 1)) == 0) return within_period(a, b.low + 1);
    if (is_one(a) && a.low >= 0 && (a.low & (a.low + 1)) == 0) return within_period(b, a.low + 1);
    if (a.low >= 0) return {0, b.low >= 0 ? min_of(a.high, b.high) : a.high};
    return b.low >= 0 ? IntSpan{0, b.high} : any_int();
}
// All bits below the highest of either.
__device__ __forceinline__ IntSpan bits_of_either(IntSpan a, IntSpan b) {
    if (a.low < 0 || b.low < 0) return any_int();
    i64 high = max_of(a.high, b.high);
    for (int by = 1; by < 32; by *= 2) high |= high >> by;
    return {0, high};
}
__device__ __forceinline__ IntSpan span_or_both(IntSpan a, IntSpan b) {
    return is_one(a) && is_one(b) ? IntSpan{a.low | b.low, a.low | b.low} : bits_of_either(a, b);
}
__device__ __forceinline__ IntSpan span_xor(IntSpan a, IntSpan b) {
    return is_one(a) && is_one(b) ? IntSpan{a.low ^ b.low, a.low ^ b.low} : bits_of_either(a, b);
}

__device__ __forceinline__ FloatSpan corners(float a, float b, float c, float d, bool nan) {
    if (a != a || b != b || c != c || d != d) return any_float();
    return floats(min_of(min_of(a, b), min_of(c, d)), max_of(max_of(a, b), max_of(c, d)), nan);
}
__device__ __forceinline__ bool is_infinite(FloatSpan x) {
    return abs_of(x.low) > kLargest || abs_of(x.high) > kLargest;
}
__device__ __forceinline__ bool has_zero(FloatSpan x) { return x.low <= 1e-37f && x.high >= -1e-37f; }
__device__ __forceinline__ FloatSpan span_add(FloatSpan a, FloatSpan b) {
    return corners(a.low + b.low, a.low + b.high, a.high + b.low, a.high + b.high, a.nan || b.nan);
}
__device__ __forceinline__ FloatSpan span_subtract(FloatSpan a, FloatSpan b) {
    return corners(a.low - b.low, a.low - b.high, a.high - b.low, a.high - b.high, a.nan || b.nan);
}
__device__ __forceinline__ FloatSpan span_multiply(FloatSpan a, FloatSpan b) {
    if ((is_infinite(a) && has_zero(b)) || (is_infinite(b) && has_zero(a))) return any_float();
    return corners(a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high, a.nan || b.nan);
}
__device__ __forceinline__ FloatSpan span_divide(FloatSpan a, FloatSpan b) {
    if (has_zero(b)) return any_float();
    return corners(divide(a.low, b.low), divide(a.low, b.high), divide(a.high, b.low), divide(a.high, b.high),
                   a.nan || b.nan);
}

__device__ __forceinline__ IntSpan span_min(IntSpan a, IntSpan b) {
    return {min_of(a.low, b.low), min_of(a.high, b.high)};
}
__device__ __forceinline__ IntSpan span_max(IntSpan a, IntSpan b) {
    return {max_of(a.low, b.low), max_of(a.high, b.high)};
}
__device__ __forceinline__ FloatSpan span_min(FloatSpan a, FloatSpan b) {
    return {min_of(a.low, b.low), min_of(a.high, b.high), a.nan || b.nan};
}
__device__ __forceinline__ FloatSpan span_max(FloatSpan a, FloatSpan b) {
    return {max_of(a.low, b.low), max_of(a.high, b.high), a.nan || b.nan};
}

// With NaN, comparisons are false, and != is true.
__device__ __forceinline__ bool has_nan(IntSpan, IntSpan) { return false; }
__device__ __forceinline__ bool has_nan(FloatSpan a, FloatSpan b) { return a.nan || b.nan; }
template <class Span>
__device__ __forceinline__ TruthSpan span_less(Span a, Span b) {
    return {a.low < b.high, has_nan(a, b) || a.high >= b.low};
}
template <class Span>
__device__ __forceinline__ TruthSpan span_less_equal(Span a, Span b) {
    return {a.low <= b.high, has_nan(a, b) || a.high > b.low};
}
template <class Span>
__device__ __forceinline__ TruthSpan span_equal(Span a, Span b) {
    const bool same = a.low == a.high && b.low == b.high && a.low == b.low;
    return {a.low <= b.high && b.low <= a.high, has_nan(a, b) || !same};
}
__device__ __forceinline__ TruthSpan span_equal(TruthSpan a, TruthSpan b) { return span_not(span_xor(a, b)); }
template <class Span>
__device__ __forceinline__ TruthSpan span_not_equal(Span a, Span b) {
    return span_not(span_equal(a, b));
}

// What an array holds where its indices lie in ranges: `Load(offset, bit)` of each element.
template <class Span, class Load>
__device__ __forceinline__ Span span_load(const ProgramArray& array, const IntSpan (&indices)[4], int rank,
                                          bool bits, Span any, const Load& load) {
    int low[4], high[4];
    i64 elements = 1;
#pragma unroll
    for (int axis = 0; axis < 4; ++axis) {
        const i64 last = axis < rank ? array.extents[axis] - 1 : 0;
        low[axis] = static_cast<int>(max_of<i64>(min_of(indices[axis].low, last), 0));
        high[axis] = static_cast<int>(max_of<i64>(min_of(indices[axis].high, last), 0));
        elements *= high[axis] - low[axis] + 1;
        if (elements > kMostScanned) return any;
    }
    // The last axis is counted through in the innermost loop, several elements at a time, so that their loads
    // are in flight together; the last one is read again and again until there are so many.
    const int last_axis = rank - 1;
    i64 first = 0;
    int steps[4];
#pragma unroll
    for (int axis = 0; axis < 4; ++axis) {
        steps[axis] = axis < last_axis ? high[axis] - low[axis] : 0;
        if (axis < last_axis) first += low[axis] * array.strides[axis];
    }
    Span found = any;
    bool is_first = true;
    for (int a = 0; a <= steps[0]; ++a) {
        for (int b = 0; b <= steps[1]; ++b) {
            for (int c = 0; c <= steps[2]; ++c) {
                const i64 line = first + a * array.strides[0] + b * array.strides[1] + c * array.strides[2];
                for (int d = low[last_axis]; d <= high[last_axis]; d += kScannedAtOnce) {
                    Span elements[kScannedAtOnce];
#pragma unroll
                    for (int i = 0; i < kScannedAtOnce; ++i) {
                        const int at = min_of(d + i, high[last_axis]);
                        const i64 offset = line + (bits ? at >> 5 : at) * array.strides[last_axis];
                        elements[i] = span_of(load(offset, bits ? at & 31 : 0));
                    }
#pragma unroll
                    for (int i = 0; i < kScannedAtOnce; ++i) {
                        found = is_first ? elements[i] : span_or(found, elements[i]);
                        is_first = false;
                    }
                }
            }
        }
    }
    return found;
}

}  // namespace fa
