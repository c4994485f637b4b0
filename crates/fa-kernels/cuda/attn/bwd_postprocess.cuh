// Turns f32 accumulators of gradients into rows of the gradient.
#pragma once
#include "attn/epilogue.cuh"
#include "config.cuh"
#include "params.cuh"
#include "ptx/math.cuh"
#include "ptx/thread.cuh"
#include "types.cuh"

namespace fa {

// A tile of Columns columns whose element (row, column) is at Order::offset: its first `rows` rows and `columns` columns (a multiple
// of 8), times `factor`, to rows `stride` elements apart. By all threads of the block.
template <Dtype T, int Columns, class Order>
__device__ __forceinline__ void finish_rows(const float* accum, u16* out, i64 stride, int rows, int columns, float factor) {
    constexpr int kChunks = Columns / 8;
    for (int chunk = thread_index(); chunk < rows * kChunks; chunk += cta_threads()) {
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

// dQ of a tile of queries: one CTA per tile, query head and sequence. CTAs run in reverse tile order: the last tiles were
// accumulated last and are likely still in L2. C is an Sm80BwdConfig or an Sm90BwdConfig, Layout its BwdLayout.
template <auto C, class Layout>
__device__ __forceinline__ void bwd_postprocess(const BwdParams& params) {
    const int tile = cta_count() - 1 - cta_index();
    const int m_block = tile % params.m_blocks, batch_head = tile / params.m_blocks;
    const int batch = batch_head / params.shape.heads_q, head = batch_head % params.shape.heads_q;
    const int row = m_block * C.tile_m;
    u16* out = static_cast<u16*>(params.dq.data) + batch * params.dq.strides.batch + row * params.dq.strides.seq + head * params.dq.strides.head;
    const float* accum = params.dq_accum + i64(tile) * (C.tile_m * C.head_dim);
    finish_rows<C.dtype, C.head_dim, typename Layout::DqOrder>(accum, out, params.dq.strides.seq, min(C.tile_m, params.shape.seqlen_q - row),
                                                               params.shape.head_dim, params.score.scale);
}

// dK and dV of a tile of keys: one CTA per tile, K/V head and sequence.
template <auto C, class Layout>
__device__ __forceinline__ void bwd_postprocess_kv(const BwdParams& params) {
    const int n_block = cta_index() % params.n_blocks, batch_head = cta_index() / params.n_blocks;
    const int batch = batch_head / params.shape.heads_kv, head = batch_head % params.shape.heads_kv;
    const int row = n_block * C.tile_n, rows = min(C.tile_n, params.shape.seqlen_k - row);
    u16* dk = static_cast<u16*>(params.dk.data) + batch * params.dk.strides.batch + row * params.dk.strides.seq + head * params.dk.strides.head;
    u16* dv = static_cast<u16*>(params.dv.data) + batch * params.dv.strides.batch + row * params.dv.strides.seq + head * params.dv.strides.head;
    const i64 tile = cta_index();
    finish_rows<C.dtype, C.head_dim, typename Layout::DkOrder>(params.dk_accum + tile * (C.tile_n * C.head_dim), dk, params.dk.strides.seq,
                                                               rows, params.shape.head_dim, params.score.scale);
    finish_rows<C.dtype, C.head_dim_v, typename Layout::DvOrder>(params.dv_accum + tile * (C.tile_n * C.head_dim_v), dv,
                                                                 params.dv.strides.seq, rows, params.shape.head_dim_v, 1.f);
}

}  // namespace fa
