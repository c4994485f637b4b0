// Fixed-width integer names and the constants and helpers that every header uses. Includes no CUDA toolkit
// header.
#pragma once

namespace fa {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

__device__ constexpr float kLn2 = 0.693147180559945309f;
__device__ constexpr float kLog2e = 1.44269504088896341f;
__device__ constexpr float kLargest = 3.402823466e38f;  // of f32

template <typename T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

template <typename T>
__host__ __device__ constexpr T min_of(T a, T b) {
    return a < b ? a : b;
}

template <typename T>
__host__ __device__ constexpr T max_of(T a, T b) {
    return a > b ? a : b;
}

// Either<Which, A, B> is A if Which, else B.
template <bool Which, class A, class B>
struct Conditional {
    using Type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
    using Type = B;
};
template <bool Which, class A, class B>
using Either = typename Conditional<Which, A, B>::Type;

}  // namespace fa
