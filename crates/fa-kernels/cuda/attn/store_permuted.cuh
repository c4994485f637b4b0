// Stores rows of O whose columns are in the order of a transposed V (tile/transpose_bytes.cuh).
#pragma once
#include "attn/store_rows.cuh"
#include "config.cuh"
#include "ptx/compiler.cuh"
#include "ptx/math.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

namespace fa {

// Stores row `row` (0 or 1, a compile-time constant) of the thread's two rows of O, times `factor`, to the
// row at `out`, up to `columns`. Of 16 columns lane t of a quad holds 4t to 4t + 3: even and odd ones in two
// blocks of 8 accumulator columns. Neighbouring lanes exchange halves of 32 columns, so that each stores 16
// bytes. All lanes take part; `inside` says whether the row exists.
template <Dtype T, int N>
__device__ __forceinline__ void store_permuted_row(int row, u16* out, bool inside, const float (&acc)[N],
                                                   float factor, int columns) {
    static_assert(N % 16 == 0, "columns in steps of 32");
    const int lane = thread_index() % 4;
    const bool odd = lane & 1;
#pragma unroll
    for (int block = 0; block < N / 16; ++block) {
        u32 words[2][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = 16 * block + 8 * half + 2 * row;
            words[half][0] = pack<T>(acc[at] * factor, acc[at + 4] * factor);
            words[half][1] = pack<T>(acc[at + 1] * factor, acc[at + 5] * factor);
        }
        Vec16 vec;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 received = shuffle_xor(odd ? words[0][i] : words[1][i], 1);
            vec.words[i] = odd ? received : words[0][i];
            vec.words[2 + i] = odd ? words[1][i] : received;
        }
        const int column = 32 * block + (odd ? 16 + 4 * (lane - 1) : 4 * lane);
        if (inside && column < columns) *reinterpret_cast<Vec16*>(out + column) = vec;
        // One block after another: all at once would need more registers than are free.
        compiler_fence();
    }
}

}  // namespace fa
