// The backward's postprocess: gradients from their f32 accumulators.
#pragma once
#include "attn/seqlen.cuh"
#include "attn/store_rows.cuh"
#include "attn/tensor_view.cuh"
#include "config.cuh"
#include "params.cuh"
#include "ptx/math.cuh"
#include "ptx/thread.cuh"
#include "types.cuh"

namespace fa {

// Scales and rounds the first `rows` rows and `columns` columns (a multiple of 8) of a tile of Columns
// columns, by all threads of the CTA. Order::offset says where element (row, column) is; rows of `out` are
// `stride` elements apart.
template <Dtype T, int Columns, class Order>
__device__ __forceinline__ void convert_rows(const float* accum, u16* out, i64 stride, int rows, int columns,
                                             float factor) {
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

// dQ: one CTA per tile of queries, query head and sequence. CTAs run in reverse tile order: the last tiles
// were accumulated last and are likely still in L2. C is an Sm80BwdConfig or Sm90BwdConfig, Layout its
// BwdLayout.
template <auto C, class Layout>
__device__ __forceinline__ void bwd_postprocess(const BwdParams& params) {
    const int tile = cta_count() - 1 - cta_index();
    const int m_block = tile % params.m_blocks, batch_head = tile / params.m_blocks;
    const int batch = batch_head / params.shape.heads_q, head = batch_head % params.shape.heads_q;
    const Seqlen<> seqlen(params.shape, batch);
    const int row = m_block * C.tile_m;
    convert_rows<C.dtype, C.head_dim, typename Layout::DqOrder>(
        params.dq_accum + i64(tile) * (C.tile_m * C.head_dim), view(params.dq).row(batch, row, head),
        params.dq.strides.seq, min(C.tile_m, seqlen.q() - row), params.shape.head_dim, params.score.scale);
}

// dK and dV: one CTA per tile of keys, K/V head and sequence.
template <auto C, class Layout>
__device__ __forceinline__ void bwd_postprocess_kv(const BwdParams& params) {
    const int n_block = cta_index() % params.n_blocks, batch_head = cta_index() / params.n_blocks;
    const int batch = batch_head / params.shape.heads_kv, head = batch_head % params.shape.heads_kv;
    const Seqlen<> seqlen(params.shape, batch);
    const int row = n_block * C.tile_n, rows = min(C.tile_n, seqlen.k() - row);
    const i64 tile = cta_index();
    convert_rows<C.dtype, C.head_dim, typename Layout::DkOrder>(
        params.dk_accum + tile * (C.tile_n * C.head_dim), view(params.dk).row(batch, row, head),
        params.dk.strides.seq, rows, params.shape.head_dim, params.score.scale);
    convert_rows<C.dtype, C.head_dim_v, typename Layout::DvOrder>(
        params.dv_accum + tile * (C.tile_n * C.head_dim_v), view(params.dv).row(batch, row, head),
        params.dv.strides.seq, rows, params.shape.head_dim_v, 1.f);
}

}  // namespace fa
