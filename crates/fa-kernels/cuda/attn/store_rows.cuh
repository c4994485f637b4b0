// Writes rows of accumulator fragments to device memory.
#pragma once
#include "attn/bwd_tile.cuh"
#include "attn/epilogue.cuh"
#include "params.cuh"
#include "ptx/compiler.cuh"
#include "ptx/math.cuh"
#include "ptx/thread.cuh"
#include "types.cuh"

namespace fa {

// A thread's row of N / 2 columns of every 8 ... : registers 2 Row, 2 Row + 1 of each four, times `factor`, from column `column` (a
// multiple of 16) of the row at `out` on, up to `columns`. All lanes take part; `inside` tells whose row exists.
template <Dtype T, int Row, int N>
__device__ __forceinline__ void store_fragment_row(u16* out, bool inside, const float (&acc)[N], float factor, int column, int columns) {
    const int lane = thread_index() % 4;
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
        compiler_fence();
    }
}

// Zeros for dK and dV of `tile_n` keys that no query sees, by all threads of the block. (Accumulators of several parts, where there
// are some, hold them already.)
__device__ __forceinline__ void store_no_gradient(const BwdParams& params, const BwdTile& tile, int tile_n) {
    if (params.head_splits > 1) return;
    const int first = tile.n_block * tile_n, left = min(tile_n, params.shape.seqlen_k - first);
    auto clear = [&](void* out, const RowStrides& strides, int columns) {
        u16* rows = static_cast<u16*>(out) + tile.batch * strides.batch + first * strides.seq + tile.kv_head * strides.head;
        const int chunks = columns / 8;
        for (int chunk = thread_index(); chunk < left * chunks; chunk += cta_threads()) {
            *reinterpret_cast<Vec16*>(rows + chunk / chunks * strides.seq + chunk % chunks * 8) = Vec16{};
        }
    };
    clear(params.dk.data, params.dk.strides, params.shape.head_dim);
    clear(params.dv.data, params.dv.strides, params.shape.head_dim_v);
}

}  // namespace fa
