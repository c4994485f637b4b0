// What the generated header of a program (`mods.cuh`) is made of: arrays whose indices are clamped, and the
// language's operations. Integers wrap; every operation has a result for every operand.
#pragma once
#include "config.cuh"
#include "program_params.cuh"
#include "ptx/math.cuh"
#include "ptx/special.cuh"
#include "types.cuh"

namespace fa {

// How the elements lie that a score's program reads before the scores are there: in the order of keys, or in
// that of distances of query and key.
enum class AheadForm { None, Keys, Distances };

template <int Axis>
__device__ __forceinline__ int clamped(const ProgramArray& array, int index) {
    return max_of(min_of(index, array.extents[Axis] - 1), 0);
}

// Elements from index 0 of an axis to `index`.
template <int Axis>
__device__ __forceinline__ i64 axis_offset(const ProgramArray& array, int index) {
    return clamped<Axis>(array, index) * array.strides[Axis];
}

// Words from bit 0 of an axis to bit `index`, and its place in its word.
template <int Axis>
__device__ __forceinline__ i64 word_offset(const ProgramArray& array, int index) {
    return (clamped<Axis>(array, index) >> 5) * array.strides[Axis];
}
template <int Axis>
__device__ __forceinline__ int bit_index(const ProgramArray& array, int index) {
    return clamped<Axis>(array, index) & 31;
}

__device__ __forceinline__ float load_f32(const ProgramArray& array, i64 offset) {
    return static_cast<const float*>(array.data)[offset];
}
__device__ __forceinline__ float load_f16(const ProgramArray& array, i64 offset) {
    return unpack_low<Dtype::F16>(static_cast<const u16*>(array.data)[offset]);
}
__device__ __forceinline__ float load_bf16(const ProgramArray& array, i64 offset) {
    return unpack_low<Dtype::Bf16>(static_cast<const u16*>(array.data)[offset]);
}
__device__ __forceinline__ int load_i32(const ProgramArray& array, i64 offset) {
    return static_cast<const int*>(array.data)[offset];
}
__device__ __forceinline__ int load_u8(const ProgramArray& array, i64 offset) {
    return static_cast<const u8*>(array.data)[offset];
}
__device__ __forceinline__ bool load_bool(const ProgramArray& array, i64 offset) {
    return static_cast<const u8*>(array.data)[offset] != 0;
}
// A word of bits.
__device__ __forceinline__ u32 load_word(const ProgramArray& array, i64 offset) {
    return static_cast<const u32*>(array.data)[offset];
}
__device__ __forceinline__ bool load_bit(const ProgramArray& array, i64 offset, int bit) {
    return (static_cast<const u32*>(array.data)[offset] >> bit & 1) != 0;
}

__device__ __forceinline__ int mods_add(int a, int b) {
    return static_cast<int>(static_cast<u32>(a) + static_cast<u32>(b));
}
__device__ __forceinline__ int mods_subtract(int a, int b) {
    return static_cast<int>(static_cast<u32>(a) - static_cast<u32>(b));
}
__device__ __forceinline__ int mods_multiply(int a, int b) {
    return static_cast<int>(static_cast<u32>(a) * static_cast<u32>(b));
}
__device__ __forceinline__ int mods_negate(int x) { return mods_subtract(0, x); }
__device__ __forceinline__ int mods_abs(int x) { return x < 0 ? mods_negate(x) : x; }

// Rounded to minus infinity, and what is left, which is not negative; divisors are positive.
__device__ __forceinline__ int floor_divide(int a, int b) {
    const int divisor = max_of(b, 1);
    return a / divisor - (a % divisor < 0 ? 1 : 0);
}
__device__ __forceinline__ int floor_modulo(int a, int b) {
    const int divisor = max_of(b, 1);
    const int rest = a % divisor;
    return rest < 0 ? rest + divisor : rest;
}

// Amounts outside 0..32 shift everything out.
__device__ __forceinline__ int shift_left(int x, int by) {
    return static_cast<u32>(by) < 32 ? static_cast<int>(static_cast<u32>(x) << by) : 0;
}
__device__ __forceinline__ int shift_right(int x, int by) {
    return x >> static_cast<int>(min_of(static_cast<u32>(by), 31u));
}

__device__ __forceinline__ float mods_exp(float x) { return exp2_approx(x * kLog2e); }
__device__ __forceinline__ float mods_log(float x) { return log2_approx(x) * kLn2; }
__device__ __forceinline__ float mods_sigmoid(float x) {
    return reciprocal_approx(1.f + exp2_approx(x * -kLog2e));
}
// tanh.approx is too inaccurate for f16.
__device__ __forceinline__ float mods_tanh(float x) {
    return fmaf(-2.f, reciprocal_approx(1.f + exp2_approx(x * (2.f * kLog2e))), 1.f);
}

// x less the nearest multiple of 2 pi, whose rounding error is subtracted too.
__device__ __forceinline__ float within_turn(float x) {
    const float turns = -nearest_integer(x * 0.159154943f);
    return fmaf(turns, -1.74845553e-7f, fmaf(turns, 6.28318548f, x));
}
__device__ __forceinline__ float mods_sin(float x) { return sin_approx(within_turn(x)); }
__device__ __forceinline__ float mods_cos(float x) { return cos_approx(within_turn(x)); }

}  // namespace fa
