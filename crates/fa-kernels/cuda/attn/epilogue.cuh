// Writes O and LSE straight from accumulator fragments: lanes of a quad trade registers until each holds 8 neighbouring
// elements, so that a store is 16 bytes and a quad's stores are 64 contiguous bytes. No shared memory is needed.
#pragma once
#include "attn/rows.cuh"
#include "params.cuh"
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

// Where one row of O and its LSE go.
template <bool PackGqa>
struct OutputRow {
    bool inside;
    u16* out;
    i64 lse;

    __device__ __forceinline__ OutputRow(const FwdParams& params, int row, int head, int batch) {
        const Rows<PackGqa> rows(params);
        const int query = rows.query(row);
        const int query_head = rows.head(row, head);
        inside = row < rows.count(params);
        out = static_cast<u16*>(params.out.data) + batch * params.out.strides.batch + query * params.out.strides.seq +
              query_head * params.out.strides.head;
        lse = (i64(batch) * params.shape.heads_q + query_head) * params.shape.seqlen_q + query;
    }
};

// Rows `row` and `row + 8` of the tile's head from N = head_dim_v / 2 accumulators, scaled by `factor`.
template <Dtype T, bool PackGqa, int N>
__device__ __forceinline__ void store_output(const FwdParams& params, float (&o)[N], const float (&factor)[2],
                                             const float (&lse)[2], int row, int head, int batch) {
    static_assert(N % 8 == 0, "head_dim_v in steps of 16");
    const int lane = thread_index() % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const OutputRow<PackGqa> target(params, row + 8 * r, head, batch);
#pragma unroll
        for (int block = 0; block < ceil_div(N, 16); ++block) {
            Vec16 vec;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = 16 * block + 4 * i + 2 * r;
                // The last 16 columns may stand alone: the other two lanes then have nothing to store.
                vec.words[i] = at < N ? pack<T>(o[at] * factor[r], o[at + 1] * factor[r]) : 0;
            }
            quad_transpose(vec.words, lane);
            const int column = 32 * block + 8 * lane;
            if (target.inside && column < params.shape.head_dim_v) *reinterpret_cast<Vec16*>(target.out + column) = vec;
            // Finish one block before the next: all at once would need more registers than O leaves.
            compiler_fence();
        }
        if (params.lse != nullptr && lane == 0 && target.inside) params.lse[target.lse] = lse[r];
    }
}

// The same rows where no query of the tile sees a key: O = 0 and LSE = -inf.
template <bool PackGqa>
__device__ __forceinline__ void store_nothing_seen(const FwdParams& params, int row, int head, int batch) {
    const int lane = thread_index() % 4;
    for (int r = 0; r < 2; ++r) {
        const OutputRow<PackGqa> target(params, row + 8 * r, head, batch);
        if (!target.inside) continue;
        for (int column = 8 * lane; column < params.shape.head_dim_v; column += 32) {
            *reinterpret_cast<Vec16*>(target.out + column) = Vec16{};
        }
        if (params.lse != nullptr && lane == 0) params.lse[target.lse] = minus_infinity();
    }
}

}  // namespace fa
