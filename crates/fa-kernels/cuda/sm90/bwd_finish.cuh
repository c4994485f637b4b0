// The last steps of the SM90 backward: dQ, and dK and dV where several blocks add to them, from their f32 accumulators.
#pragma once
#include "attn/bwd_finish.cuh"
#include "config.cuh"
#include "params.cuh"
#include "sm90/bwd_layout.cuh"

namespace fa {

// One block per tile of queries, query head and sequence.
template <Sm90BwdConfig C>
__device__ __forceinline__ void sm90_bwd_finish(const BwdParams& params) {
    using L = sm90::BwdLayout<C>;
    const int m_block = blockIdx.x % params.m_blocks, batch_head = blockIdx.x / params.m_blocks;
    const int batch = batch_head / params.heads_q, head = batch_head % params.heads_q;
    const int row = m_block * C.tile_m;
    u16* out = static_cast<u16*>(params.dq) + batch * params.dq_strides.batch + row * params.dq_strides.seq + head * params.dq_strides.head;
    const float* accum = params.dq_accum + i64(blockIdx.x) * (C.tile_m * C.head_dim);
    finish_rows<C.dtype, C.head_dim, typename L::DqOrder>(accum, out, params.dq_strides.seq, min(C.tile_m, params.seqlen_q - row),
                                                          params.head_dim, params.scale);
}

// One block per tile of keys, K/V head and sequence.
template <Sm90BwdConfig C>
__device__ __forceinline__ void sm90_bwd_finish_kv(const BwdParams& params) {
    using L = sm90::BwdLayout<C>;
    const int n_block = blockIdx.x % params.n_blocks, batch_head = blockIdx.x / params.n_blocks;
    const int batch = batch_head / params.heads_kv, head = batch_head % params.heads_kv;
    const int row = n_block * C.tile_n, rows = min(C.tile_n, params.seqlen_k - row);
    u16* dk = static_cast<u16*>(params.dk) + batch * params.dk_strides.batch + row * params.dk_strides.seq + head * params.dk_strides.head;
    u16* dv = static_cast<u16*>(params.dv) + batch * params.dv_strides.batch + row * params.dv_strides.seq + head * params.dv_strides.head;
    const i64 tile = blockIdx.x;
    finish_rows<C.dtype, C.head_dim, typename L::DkOrder>(params.dk_accum + tile * (C.tile_n * C.head_dim), dk, params.dk_strides.seq, rows,
                                                          params.head_dim, params.scale);
    finish_rows<C.dtype, C.head_dim_v, typename L::DvOrder>(params.dv_accum + tile * (C.tile_n * C.head_dim_v), dv, params.dv_strides.seq,
                                                            rows, params.head_dim_v, 1.f);
}

}  // namespace fa
