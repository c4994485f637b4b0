// Stores rows of accumulator fragments to global memory without shared memory: the lanes of a quad exchange
// registers until each holds 8 consecutive elements, so that a lane stores 16 bytes at a time and a quad 64
// contiguous bytes.
#pragma once
#include "config.cuh"
#include "ptx/compiler.cuh"
#include "ptx/math.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

namespace fa {

struct alignas(16) Vec16 {
    u32 words[4];
};

// Transposes a 4 x 4 matrix of words whose columns are the lanes of a quad.
__device__ __forceinline__ void quad_transpose(u32 (&w)[4], int lane) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit <<= 1) {
        const bool upper = lane & bit;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & bit) continue;
            const u32 received = shuffle_xor(upper ? w[i] : w[i | bit], bit);
            w[i] = upper ? received : w[i];
            w[i | bit] = upper ? w[i | bit] : received;
        }
    }
}

// Stores row `row` (0 or 1, a compile-time constant) of the thread's two rows of an accumulator fragment,
// times `factor`, to the row at `out`: its column 0 to `column`, and nothing outside of [0, columns). Lane t
// of a quad holds columns 2t and 2t + 1 of each 8. All lanes take part; `inside` says whether the row exists.
template <Dtype T, int N>
__device__ __forceinline__ void store_fragment_row(int row, u16* out, bool inside, const float (&acc)[N],
                                                   float factor, int column, int columns) {
    static_assert(N % 8 == 0, "columns in steps of 16");
    const int lane = thread_index() % 4;
#pragma unroll
    for (int block = 0; block < ceil_div(N, 16); ++block) {
        Vec16 vec;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = 16 * block + 4 * i + 2 * row;
            // The last block may have 16 columns only: two lanes then have nothing to store.
            vec.words[i] = at < N ? pack<T>(acc[at] * factor, acc[at + 1] * factor) : 0;
        }
        quad_transpose(vec.words, lane);
        const int within = 32 * block + 8 * lane;
        if (inside && within < 2 * N && u32(column + within) < u32(columns))
            *reinterpret_cast<Vec16*>(out + column + within) = vec;
        // One block after another: all at once would need more registers than are free.
        compiler_fence();
    }
}

}  // namespace fa
