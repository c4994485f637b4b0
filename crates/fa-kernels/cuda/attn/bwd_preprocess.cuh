// The backward's preprocess kernel: computes dPsum and the base-2 LSE of every query row, and zeroes the f32
// accumulators, the semaphores and the tile counter.
#pragma once
#include "attn/bwd_tile.cuh"
#include "attn/exponent.cuh"
#include "attn/programs.cuh"
#include "attn/scheduler.cuh"
#include "attn/seqlen.cuh"
#include "attn/store_rows.cuh"
#include "attn/tensor_view.cuh"
#include "attn/visibility.cuh"
#include "bwd_params.cuh"
#include "config.cuh"
#include "ptx/math.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

namespace fa {

// Zeroes `count` values, a multiple of 4, as thread `thread` of `threads`.
__device__ __forceinline__ void clear_f32(float* values, i64 count, i64 thread, i64 threads) {
#pragma unroll 1
    for (i64 i = thread * 4; i < count; i += threads * 4) *reinterpret_cast<Vec16*>(values + i) = Vec16{};
}

// Lane `lane`'s 16-byte chunks of two rows of Columns columns, whose dot product eight neighbouring lanes
// compute.
template <Dtype T, int Columns>
struct RowChunks {
    static constexpr int kChunks = ceil_div(Columns, 64);
    Vec16 of_a[kChunks], of_b[kChunks];

    // Loads the first `columns` columns; the others are zero.
    __device__ __forceinline__ void load(const u16* a, const u16* b, int columns, int lane) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const int column = 64 * i + 8 * lane;
            of_a[i] = of_b[i] = Vec16{};
            if (column < columns) {
                of_a[i] = *reinterpret_cast<const Vec16*>(a + column);
                of_b[i] = *reinterpret_cast<const Vec16*>(b + column);
            }
        }
    }
    // The lane's part of the dot product, added to `sum`.
    __device__ __forceinline__ float dot(float sum) const {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                sum = fmaf(unpack_low<T>(of_a[i].words[j]), unpack_low<T>(of_b[i].words[j]), sum);
                sum = fmaf(unpack_high<T>(of_a[i].words[j]), unpack_high<T>(of_b[i].words[j]), sum);
            }
        }
        return sum;
    }
};

// The tile of queries of a preprocess or postprocess CTA; there is one CTA per tile, query head and sequence.
// CTAs take the tiles in reverse order: the main kernel starts with what the preprocess touched last, and the
// postprocess with what the main kernel accumulated last, which is likely still in L2.
struct QueryTile {
    int m_block, batch, head;
    i64 index;  // in the workspace
};

// The CTA's tile from the work plan (lengths on the device); false for CTAs beyond the plan's last tile.
template <int TileM>
__device__ __forceinline__ bool planned_query_tile(const BwdParams& params, QueryTile& tile) {
    const WorkPlan plan{params.plan};
    const int items = plan.count(PlanCount::MTiles);
    const int number = items * params.shape.heads_q - 1 - cta_index();
    if (number < 0) return false;
    const PlanItem item = plan.m_tiles()[number % items];
    tile.m_block = item.block;
    tile.batch = item.sequence;
    tile.head = number / items;
    const auto seqlen = Seqlen<true>::of(params, tile.batch);
    const auto place = WorkspacePlace::of_queries<TileM>(params, seqlen, tile.batch);
    tile.index =
        (i64(place.entry) * params.shape.heads_q + tile.head) * params.m_blocks + place.first + tile.m_block;
    return true;
}

// Zeroes the f32 accumulators of dK and dV by a grid-stride loop: the grid counts tiles of queries, not of
// keys.
template <auto C>
__device__ __forceinline__ void clear_key_gradients(const BwdParams& params) {
    // Packed sequences share one entry of the workspace.
    const i64 sequences = C.varied && params.varlen.total_k > 0 ? 1 : params.shape.batch;
    const i64 keys = sequences * params.shape.heads_kv * params.n_blocks * C.tile_n;
    const i64 thread = i64(cta_index()) * cta_threads() + thread_index(),
              threads = i64(cta_count()) * cta_threads();
    clear_f32(params.dk_accum, keys * C.head_dim, thread, threads);
    clear_f32(params.dv_accum, keys * C.head_dim_v, thread, threads);
    if constexpr (C.deterministic) {
        for (i64 i = thread; i < keys / C.tile_n * 2; i += threads) params.dkv_semaphores[i] = 0;
    }
}

// Resets the semaphores of tile `tile` of dQ.
template <auto C>
__device__ __forceinline__ void clear_turns(const BwdParams& params, i64 tile) {
#pragma unroll
    for (int of = 0; of < dq_turns<C>(); ++of) params.dq_semaphores[tile * dq_turns<C>() + of] = 0;
}

// Stores the statistics of a tile of queries: dPsum and the LSE in base 2 go to element workspace_row(i) of
// the workspace. The forward's LSE of query i, and its gradient if given, are at lse_row(i). With a gradient
// of the LSE, dS = P (dP - (dPsum - dLSE)): dPsum is stored less dLSE. `under_loads` is called once by
// every thread, while its first loads are in flight.
template <auto C, class LseRow, class Row, class UnderLoads>
__device__ __forceinline__ void store_statistics(const BwdParams& params, const Seqlen<C.varied>& seqlen,
                                                 int m_block, int batch, int head, const LseRow& lse_row,
                                                 const Row& workspace_row, const UnderLoads& under_loads) {
    const u16* out = view(params.out).row(batch, seqlen.q_offset(), head);
    const u16* dout = view(params.dout).row(batch, seqlen.q_offset(), head);
    const int lane = thread_index() % 8;
    // A warp computes 4 rows, and the shuffles need whole warps. Each of the 256 threads has a row.
    static_assert(C.tile_m % 4 == 0 && C.tile_m >= 32);
    // A thread's loads for kRows rows of kColumns columns, 128 bytes, are in flight together.
    constexpr int kColumns = min_of(C.head_dim_v, 128), kRows = kColumns <= 64 ? 4 : 2;
    const int stride = cta_threads() / 8;
    bool is_first = true;
    for (int first = thread_index() / 8; first < C.tile_m; first += kRows * stride) {
        float sum[kRows] = {}, lse[kRows];
#pragma unroll 1
        for (int column = 0; column < C.head_dim_v; column += kColumns) {
            RowChunks<C.dtype, kColumns> chunks[kRows];
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const int row = first + i * stride, query = m_block * C.tile_m + row;
                const bool inside = row < C.tile_m && query < seqlen.q();
                chunks[i].load(out + query * params.out.strides.seq + column,
                               dout + query * params.dout.strides.seq + column,
                               inside ? params.shape.head_dim_v - column : 0, lane);
                if (column == 0) lse[i] = inside && lane == 0 ? params.lse[lse_row(query)] : minus_infinity();
            }
            if (is_first) under_loads();
            is_first = false;
#pragma unroll
            for (int i = 0; i < kRows; ++i) sum[i] = chunks[i].dot(sum[i]);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int row = first + i * stride, query = m_block * C.tile_m + row;
#pragma unroll
            for (int distance = 1; distance < 8; distance *= 2) sum[i] += shuffle_xor(sum[i], distance);
            if (lane != 0 || row >= C.tile_m) continue;
            // An LSE of +inf makes P = 2^-inf = 0 in rows past the end. A row that saw no key has masked
            // scores only: any finite LSE makes its P 0, and its LSE has no gradient.
            float lse_log2 = -minus_infinity();
            if (query < seqlen.q()) {
                const bool is_empty = lse[i] == minus_infinity();
                constexpr bool kMayBeLarge = C.sinks || C.alibi || kScoreProgram;
                lse_log2 = is_empty ? 0.f : kMayBeLarge ? lse_exponent(lse[i]) : lse[i] * kLog2e;
                if (params.dlse != nullptr && !is_empty) sum[i] -= params.dlse[lse_row(query)];
            }
            const i64 at = workspace_row(query);
            params.dpsum[at] = sum[i];
            params.lse_log2[at] = lse_log2;
        }
    }
}

// The kernel's body, one CTA per tile of queries and query head. C is the config of a backward kernel.
template <auto C>
__device__ __forceinline__ void bwd_preprocess(const BwdParams& params) {
    constexpr int kDqTile = C.tile_m * C.head_dim;
    if constexpr (C.varied) {
        if (params.dk_accum != nullptr) clear_key_gradients<C>(params);
        if (params.tile_counter != nullptr && cta_index() == 0 && thread_index() == 0)
            *params.tile_counter = 0;
        QueryTile tile;
        if (!planned_query_tile<C.tile_m>(params, tile)) return;
        if (params.dq_semaphores != nullptr && thread_index() == 0) clear_turns<C>(params, tile.index);
        const auto seqlen = Seqlen<true>::of(params, tile.batch);
        const i64 lse_row = seqlen.lse_row(tile.batch, tile.head, params.shape.heads_q);
        const Visibility<C.mask, true> visible{params.shape, seqlen};
        store_statistics<C>(
            params, seqlen, tile.m_block, tile.batch, tile.head, [&](int query) { return lse_row + query; },
            [&](int query) { return (tile.index - tile.m_block) * C.tile_m + query; },
            [&] {
                // Under a program's mask the postprocess knows which tiles have no sums.
                if (!stores_dq<C>(params) ||
                    (!kMaskProgram && sees_nothing<C.tile_m, C.tile_n>(visible, tile.m_block)))
                    clear_f32(params.dq_accum + tile.index * kDqTile, kDqTile, thread_index(), cta_threads());
            });
    } else {
        const int tile = cta_count() - 1 - cta_index();
        const int m_block = tile % params.m_blocks, batch_head = tile / params.m_blocks;
        const int batch = batch_head / params.shape.heads_q, head = batch_head % params.shape.heads_q;
        const Seqlen<> seqlen(params.shape, batch);
        if (thread_index() == 0) {
            if (params.dq_semaphores != nullptr) clear_turns<C>(params, tile);
            if (params.tile_counter != nullptr && cta_index() == 0) *params.tile_counter = 0;
        }
        const int share = ceil_div(params.shape.group_size, params.head_splits);
        const int kv_head = head / params.shape.group_size;
        const int part = (batch * params.shape.heads_kv + kv_head) * params.head_splits +
                         (head - kv_head * params.shape.group_size) / share;
        store_statistics<C>(
            params, seqlen, m_block, batch, head,
            [&](int query) { return i64(batch_head) * seqlen.q() + query; },
            [&](int query) { return i64(batch_head) * params.m_blocks * C.tile_m + query; },
            [&] {
                if (keeps_dq_sums<C>() && !stores_dq<C>(params, part))
                    clear_f32(params.dq_accum + i64(tile) * kDqTile, kDqTile, thread_index(), cta_threads());
                if (params.dk_accum != nullptr) clear_key_gradients<C>(params);
            });
    }
}

}  // namespace fa
