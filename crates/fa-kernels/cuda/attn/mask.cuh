// Hides scores of keys that a query does not see.
#pragma once
#include "ptx/math.cuh"

namespace fa {

// The visible columns of a thread's two accumulator rows, relative to the first column that the thread holds.
struct ColumnLimits {
    int begin[2], end[2];
};

// Register i of a 64-row accumulator holds row (i / 2) % 2 of the thread's two and column 8 * (i / 4) + i % 2 from the
// thread's first (PTX ISA, wgmma "Matrix fragments for D"; mma.m16n8k16 has the same order).
template <bool CheckBegin, bool CheckEnd = true, int N>
__device__ __forceinline__ void mask_scores(float (&s)[N], const ColumnLimits& limits) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int row = (i >> 1) & 1;
        const int column = 8 * (i / 4) + (i & 1);
        const bool hidden = (CheckEnd && column >= limits.end[row]) || (CheckBegin && column < limits.begin[row]);
        s[i] = hidden ? minus_infinity() : s[i];
    }
}

}  // namespace fa
