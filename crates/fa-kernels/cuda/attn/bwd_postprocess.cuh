// The backward's postprocess kernels: scale and round the f32 accumulators to dQ, and with split heads to dK
// and dV.
#pragma once
#include "attn/bwd_preprocess.cuh"
#include "attn/scheduler.cuh"
#include "attn/seqlen.cuh"
#include "attn/store_rows.cuh"
#include "attn/tensor_view.cuh"
#include "bwd_params.cuh"
#include "config.cuh"
#include "ptx/math.cuh"
#include "ptx/thread.cuh"
#include "types.cuh"

namespace fa {

// Writes the first `rows` rows and `columns` columns (a multiple of 8) of a tile of Columns columns, times
// `factor`, rounded to T. All threads of the CTA call it. Order::offset(row, column) is the element's offset
// in `accum`; `stride` is the row stride of `out` in elements.
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

// The same for Rows rows of accumulators in wgmma's order (sm90::AccumulatorOrder), where 16 bytes are two
// rows of two columns: rows 8 apart and columns side by side, or if transposed the other way round. A thread
// converts a block of two rows whose loads are all in flight together.
template <Dtype T, int Rows, int Columns, class Order>
__device__ __forceinline__ void convert_blocks(const float* accum, u16* out, i64 stride, int rows,
                                               int columns, float factor) {
    constexpr bool kTransposed = Order::kTransposed;
    constexpr int kWidth = kTransposed ? 16 : 8, kLoads = kWidth / 2;  // columns of a block, and its loads
    constexpr int kPairs = kTransposed ? 4 : 8, kAcross = Columns / kWidth;
    for (int block = thread_index(); block < Rows / 2 * kAcross; block += cta_threads()) {
        const int pair = block % kPairs, column = block / kPairs % kAcross * kWidth;
        const int row = block / (kPairs * kAcross) * (2 * kPairs) + (kTransposed ? 2 * pair : pair);
        if (row >= rows || column >= columns) continue;
        const float* from = accum + Order::offset(row, column);
        float4 sums[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
            sums[i] = *reinterpret_cast<const float4*>(from + i * (kTransposed ? 16 : 4));
        auto write = [&](int at_row, int at_column, auto sum) {
            if (at_row >= rows || at_column >= columns) return;
            Vec16 vec;
#pragma unroll
            for (int i = 0; i < 4; ++i) vec.words[i] = pack<T>(sum(2 * i) * factor, sum(2 * i + 1) * factor);
            *reinterpret_cast<Vec16*>(out + at_row * stride + at_column) = vec;
        };
        if constexpr (kTransposed) {
            write(row, column, [&](int i) { return sums[i].x; });
            write(row, column + 8, [&](int i) { return sums[i].z; });
            write(row + 1, column, [&](int i) { return sums[i].y; });
            write(row + 1, column + 8, [&](int i) { return sums[i].w; });
        } else {
            write(row, column, [&](int i) { return i % 2 == 0 ? sums[i / 2].x : sums[i / 2].y; });
            write(row + 8, column, [&](int i) { return i % 2 == 0 ? sums[i / 2].z : sums[i / 2].w; });
        }
    }
}

// Converts a tile of Rows rows, in blocks where its order allows.
template <Dtype T, int Rows, int Columns, class Order>
__device__ __forceinline__ void convert_tile(const float* accum, u16* out, i64 stride, int rows, int columns,
                                             float factor) {
    if constexpr (requires { Order::kTransposed; }) {
        convert_blocks<T, Rows, Columns, Order>(accum, out, stride, rows, columns, factor);
    } else {
        convert_rows<T, Columns, Order>(accum, out, stride, rows, columns, factor);
    }
}

// Zeroes the first `rows` rows and `columns` columns (a multiple of 8).
__device__ __forceinline__ void clear_rows(u16* out, i64 stride, int rows, int columns) {
    const int chunks = columns / 8;
#pragma unroll 1
    for (int chunk = thread_index(); chunk < rows * chunks; chunk += cta_threads())
        *reinterpret_cast<Vec16*>(out + chunk / chunks * stride + chunk % chunks * 8) = Vec16{};
}

// Whether nothing was added to tile `tile` of dQ, whose sums are then not zeros either: no tile of keys has
// claimed it, as a program's mask leaves its queries no key.
template <auto C>
__device__ __forceinline__ bool is_unclaimed(const BwdParams& params, i64 tile) {
    if constexpr (kMaskProgram && claims_dq<C>())
        return stores_dq<C>(params) && params.dq_semaphores[tile * dq_turns<C>()] == 0;
    return false;
}

// Writes dQ, one CTA per tile of queries and query head. C is an Sm80BwdConfig or Sm90BwdConfig, Layout its
// BwdLayout.
template <auto C, class Layout>
__device__ __forceinline__ void bwd_postprocess(const BwdParams& params) {
    QueryTile own;
    if constexpr (C.varied) {
        if (!planned_query_tile<C.tile_m>(params, own)) return;
    } else {
        const int tile = cta_count() - 1 - cta_index();
        const int batch_head = tile / params.m_blocks;
        own = {tile % params.m_blocks, batch_head / params.shape.heads_q, batch_head % params.shape.heads_q,
               tile};
    }
    const auto [m_block, batch, head, tile] = own;
    const auto seqlen = Seqlen<C.varied>::of(params, batch);
    const int row = m_block * C.tile_m;
    if (is_unclaimed<C>(params, tile)) {
        clear_rows(view(params.dq).row(batch, seqlen.q_offset() + row, head), params.dq.strides.seq,
                   min(C.tile_m, seqlen.q() - row), params.shape.head_dim);
        return;
    }
    convert_tile<C.dtype, C.tile_m, C.head_dim, typename Layout::DqOrder>(
        params.dq_accum + tile * (C.tile_m * C.head_dim),
        view(params.dq).row(batch, seqlen.q_offset() + row, head), params.dq.strides.seq,
        min(C.tile_m, seqlen.q() - row), params.shape.head_dim, params.score.scale);
}

// Writes dK and dV, one CTA per tile of keys, K/V head and sequence. Launched with split heads only.
template <auto C, class Layout>
__device__ __forceinline__ void bwd_postprocess_kv(const BwdParams& params) {
    int n_block, batch, head;
    i64 tile;
    if constexpr (C.varied) {
        const WorkPlan plan{params.plan};
        const int items = plan.count(PlanCount::NTiles);
        if (cta_index() >= items * params.shape.heads_kv) return;
        const PlanItem item = plan.n_tiles()[cta_index() % items];
        n_block = item.block, batch = item.sequence, head = cta_index() / items;
        const auto seqlen = Seqlen<true>::of(params, batch);
        const auto place = WorkspacePlace::of_keys<C.tile_n>(params, seqlen, batch);
        tile = (i64(place.entry) * params.shape.heads_kv + head) * params.n_blocks + place.first + n_block;
    } else {
        const int batch_head = cta_index() / params.n_blocks;
        n_block = cta_index() % params.n_blocks;
        batch = batch_head / params.shape.heads_kv, head = batch_head % params.shape.heads_kv;
        tile = cta_index();
    }
    const auto seqlen = Seqlen<C.varied>::of(params, batch);
    const int row = n_block * C.tile_n, rows = min(C.tile_n, seqlen.k() - row);
    convert_tile<C.dtype, C.tile_n, C.head_dim, typename Layout::DkOrder>(
        params.dk_accum + tile * (C.tile_n * C.head_dim),
        view(params.dk).row(batch, seqlen.k_offset() + row, head), params.dk.strides.seq, rows,
        params.shape.head_dim, params.score.scale);
    convert_tile<C.dtype, C.tile_n, C.head_dim_v, typename Layout::DvOrder>(
        params.dv_accum + tile * (C.tile_n * C.head_dim_v),
        view(params.dv).row(batch, seqlen.k_offset() + row, head), params.dv.strides.seq, rows,
        params.shape.head_dim_v, 1.f);
}

}  // namespace fa
