// Writes rows of accumulator fragments to device memory.
#pragma once
#include "attn/epilogue.cuh"
#include "ptx/math.cuh"
#include "types.cuh"

namespace fa {

// A thread's row of N / 2 columns of every 8 ... : registers 2 Row, 2 Row + 1 of each four, times `factor`, from column `column` (a
// multiple of 16) of the row at `out` on, up to `columns`. All lanes take part; `inside` tells whose row exists.
template <Dtype T, int Row, int N>
__device__ __forceinline__ void store_fragment_row(u16* out, bool inside, const float (&acc)[N], float factor, int column, int columns) {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int block = 0; block < ceil_div(N, 16); ++block) {
        Vec16 vec;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = 16 * block + 4 * i + 2 * Row;
            vec.words[i] = at < N ? pack<T>(acc[at] * factor, acc[at + 1] * factor) : 0;
        }
        quad_transpose(vec.words, lane);
        const int within = 32 * block + 8 * lane;
        if (inside && within < 2 * N && column + within < columns) *reinterpret_cast<Vec16*>(out + column + within) = vec;
        // Finish one block before the next: all at once would need more registers than are left.
        asm volatile("" ::: "memory");
    }
}

}  // namespace fa
