// Turns f32 accumulators of gradients into rows of the gradient.
#pragma once
#include "attn/epilogue.cuh"
#include "ptx/math.cuh"
#include "types.cuh"

namespace fa {

// A tile of Columns columns whose element (row, column) is at Order::offset: its first `rows` rows and `columns` columns (a multiple
// of 8), times `factor`, to rows `stride` elements apart. By all threads of the block.
template <Dtype T, int Columns, class Order>
__device__ __forceinline__ void finish_rows(const float* accum, u16* out, i64 stride, int rows, int columns, float factor) {
    constexpr int kChunks = Columns / 8;
    for (int chunk = threadIdx.x; chunk < rows * kChunks; chunk += blockDim.x) {
        const int row = chunk / kChunks, column = chunk % kChunks * 8;
        if (column >= columns) continue;
        Vec16 vec;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float low = accum[Order::offset(row, column + 2 * i)];
            const float high = accum[Order::offset(row, column + 2 * i + 1)];
            vec.words[i] = pack<T>(low * factor, high * factor);
        }
        *reinterpret_cast<Vec16*>(out + row * stride + column) = vec;
    }
}

}  // namespace fa
