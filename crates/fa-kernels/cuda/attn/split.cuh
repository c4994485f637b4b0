// Split keys: several CTAs share the keys of a tile and store partial results in f32; the combine kernel
// reduces them.
#pragma once
#include "attn/epilogue.cuh"
#include "attn/rows.cuh"
#include "attn/scheduler.cuh"
#include "attn/seqlen.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/grid.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

namespace fa {

// Index of the partial result of row `row` of the tile in `slot`.
__device__ __forceinline__ i64 partial_row(const FwdParams& params, int slot, int heads, int head, int row) {
    return (i64(slot) * heads + head) * params.split.slot_rows + row;
}

// Where the partial results of a tile's rows are: O of row r at out + r * stride, its LSE at lse[r].
struct PartialRows {
    float* out;
    float* lse;
    int stride;
};

// Those of a tile in the workspace.
__device__ __forceinline__ PartialRows workspace_rows(const FwdParams& params, const WorkTile& tile,
                                                      int heads) {
    const int columns = params.shape.head_dim_v;
    const i64 first = partial_row(params, tile.slot, heads, tile.head, 0);
    return {params.split.out_partial + first * columns, params.split.lse_partial + first, columns};
}

// store_output() for a part of the keys: O in f32, and LSE. `row_in_tile` is the thread's first row within
// its tile. The lanes of a quad store 32 contiguous bytes at a time.
template <int N>
__device__ __forceinline__ void store_partial(const PartialRows& rows, int columns, const float (&o)[N],
                                              const float (&factor)[2], const float (&lse)[2], int row,
                                              int end, int row_in_tile, int shift, bool has_lse = true) {
    const int lane = thread_index() % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (row + 8 * r >= end) continue;
        float* out = rows.out + i64(row_in_tile + 8 * r) * rows.stride - shift + 2 * lane;
#pragma unroll
        for (int block = 0; block < N / 4; ++block) {
            const int i = 4 * block + 2 * r;
            if (u32(8 * block - shift) < u32(columns))
                *reinterpret_cast<float2*>(out + 8 * block) = {o[i] * factor[r], o[i + 1] * factor[r]};
        }
        if (has_lse && lane == 0) rows.lse[row_in_tile + 8 * r] = lse[r];
    }
}

// The same where no query of the tile sees a key of the part: LSE = -inf, so that O is never read.
__device__ __forceinline__ void store_nothing_partial(const PartialRows& rows, int row, int end,
                                                      int row_in_tile) {
    if (thread_index() % 4 != 0) return;
    for (int r = 0; r < 2; ++r) {
        if (row + 8 * r < end) rows.lse[row_in_tile + 8 * r] = minus_infinity();
    }
}

// ---- Combine ------------------------------------------------------------------------------------

constexpr int kCombineThreads = 128;
constexpr int kCombineWarps = kCombineThreads / 32;
constexpr int kMaxHeadDim = 256;  // of O, in most kernels

// The parts of a row that a warp reads at once.
constexpr int kCombineBatch = 4;

template <int Columns>
struct CombineStorage {
    alignas(16) float sums[kCombineWarps][Columns];
};
constexpr int combine_smem_bytes = sizeof(CombineStorage<kMaxHeadDim>);

// CTAs that share a row of `Columns` columns where each row has a CTA of its own.
template <int Columns>
constexpr int kCombineRowCtas = Columns > kMaxHeadDim ? Columns / 128 : 1;

// Adds `Count` parts of a row to the lane's columns of O, from `first` on: `split` and every `Stride`-th
// after it. All their loads are in flight at once.
template <int Count, int Stride, int Parts>
__device__ __forceinline__ void add_parts(float4 (&acc)[Parts], const float* lse, const float* out,
                                          float base, float factor, int split, i64 step, int columns,
                                          int first) {
    float weight[Count];
#pragma unroll
    for (int i = 0; i < Count; ++i)
        weight[i] = exp2_approx((lse[(split + i * Stride) * step] - base) * kLog2e) * factor;
#pragma unroll
    for (int part = 0; part < Parts; ++part) {
        const int column = first + 128 * part + 4 * lane_index();
        if (column >= columns) continue;
        float4 own[Count];
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            own[i] = {};
            // O of a part without a visible key is not written.
            if (weight[i] > 0.f) {
                const i64 at = (split + i * Stride) * step * columns + column;
                own[i] = *reinterpret_cast<const float4*>(out + at);
            }
        }
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            acc[part].x += weight[i] * own[i].x;
            acc[part].y += weight[i] * own[i].y;
            acc[part].z += weight[i] * own[i].z;
            acc[part].w += weight[i] * own[i].w;
        }
    }
}

// Combines the parts' results into O and LSE, for every `stride`-th of `rows` rows from row `index` on. A row
// is combined by a warp, or, if Shared, by the warps of a CTA, which share the parts; of rows wider than
// most, by a CTA for each 128 columns. O has at most `Columns` columns.
template <Dtype T, int TileM, bool PackGqa, bool Varied, bool Sinks, int Columns, bool Shared>
__device__ __forceinline__ void combine_rows(const FwdParams& params, i64 rows, i64 index, i64 stride) {
    constexpr int kCtas = Shared ? kCombineRowCtas<Columns> : 1;  // of a row
    constexpr int kParts = Columns / (128 * kCtas);               // of 4 columns for each lane of a warp
    auto& smem = shared_memory<CombineStorage<Columns>>();
    const int lane = lane_index(), warp = warp_index(), thread = thread_index();
    const int heads = PackGqa ? params.shape.heads_kv : params.shape.heads_q;
    const int slot_rows = params.split.slot_rows, columns = params.shape.head_dim_v;
#pragma unroll 1
    for (; index < kCtas * rows; index += stride) {
        const i64 of_row = kCtas > 1 ? index / kCtas : index;
        const int first_column = kCtas > 1 ? 128 * int(index % kCtas) : 0;
        const int row = int(of_row % slot_rows);
        const int tile_head = int(of_row / slot_rows), head = tile_head % heads, number = tile_head / heads;
        PlanItem tile;
        if constexpr (Varied) {
            tile = WorkPlan{params.plan}.split_items()[number];
        } else {
            const int splits = params.split.splits;
            tile = {number / params.m_blocks, number % params.m_blocks, splits, number * splits};
        }
        const auto seqlen = Seqlen<Varied>::of(params, tile.sequence);
        const int tile_row = tile.block * tile_rows<PackGqa, TileM>(params) + row;
        const int end = Rows<PackGqa>(params.shape).count(seqlen);
        const OutputRow<PackGqa> target(params, seqlen, tile_row, end, head, tile.sequence);
        if (!target.inside) continue;
        // For the results. The plan was there before them.
        wait_for_launches_before();

        const int splits = tile.part;
        const i64 first = partial_row(params, tile.slot, heads, head, row);
        const i64 step = i64(heads) * slot_rows;
        const float* lse = params.split.lse_partial + first;
        float top = minus_infinity();
        for (int split = lane; split < splits; split += 32) top = fmaxf(top, lse[split * step]);
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) top = fmaxf(top, shuffle_xor(top, mask));
        float sink = minus_infinity();
        if constexpr (Sinks) sink = params.mods.sinks[Rows<PackGqa>(params.shape).head(tile_row, head)];
        top = fmaxf(top, sink);
        // Without a finite LSE the row saw no key.
        const float base = top == minus_infinity() ? 0.f : top;
        float sum = 0.f;
        for (int split = lane; split < splits; split += 32)
            sum += exp2_approx((lse[split * step] - base) * kLog2e);
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
        if constexpr (Sinks) sum += exp2_approx((sink - base) * kLog2e);
        const float factor = sum > 0.f ? 1.f / sum : 0.f;
        if (params.lse != nullptr && (Shared ? thread : lane) == 0 && first_column == 0)
            params.lse[target.lse] = base + logf(sum);

        float4 acc[kParts] = {};
        const float* out = params.split.out_partial + first * columns;
        constexpr int kStride = Shared ? kCombineWarps : 1;
        int split = Shared ? warp : 0;
#pragma unroll 1
        for (; split + (kCombineBatch - 1) * kStride < splits; split += kCombineBatch * kStride)
            add_parts<kCombineBatch, kStride>(acc, lse, out, base, factor, split, step, columns,
                                              first_column);
#pragma unroll 1
        for (; split < splits; split += kStride)
            add_parts<1, kStride>(acc, lse, out, base, factor, split, step, columns, first_column);
        if constexpr (Shared) {
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const int column = 128 * part + 4 * lane;
                if (first_column + column < columns)
                    *reinterpret_cast<float4*>(&smem.sums[warp][column]) = acc[part];
            }
            cta_sync();
#pragma unroll
            for (int part = 0; part < max_of(1, kParts / 2); ++part) {
                const int column = 2 * kCombineThreads * part + 2 * thread;
                if (column >= 128 * kParts || first_column + column >= columns) continue;
                float a = 0.f, b = 0.f;
#pragma unroll
                for (int i = 0; i < kCombineWarps; ++i) {
                    a += smem.sums[i][column];
                    b += smem.sums[i][column + 1];
                }
                *reinterpret_cast<u32*>(target.out + first_column + column) = pack<T>(a, b);
            }
        } else {
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const int column = 128 * part + 4 * lane;
                if (column >= columns) continue;
                u32* to = reinterpret_cast<u32*>(target.out + column);
                to[0] = pack<T>(acc[part].x, acc[part].y);
                to[1] = pack<T>(acc[part].z, acc[part].w);
            }
        }
        if constexpr (Shared) cta_sync();
    }
}

// The combine kernel's body. A warp combines a row where there are more rows than CTAs; else a CTA does,
// whose warps share the parts.
template <Dtype T, int TileM, bool PackGqa, bool Varied, bool Sinks, int Columns = kMaxHeadDim>
__device__ __forceinline__ void combine(const FwdParams& params) {
    // The plan of the forward's first CTA is not there before the forward has ended.
    if (Varied && params.plan.own_ints > 0) wait_for_launches_before();
    const int heads = PackGqa ? params.shape.heads_kv : params.shape.heads_q;
    const int tiles =
        Varied ? WorkPlan{params.plan}.count(PlanCount::SplitItems) : params.m_blocks * params.shape.batch;
    const i64 rows = i64(tiles) * heads * params.split.slot_rows;
    if (kCombineRowCtas<Columns> * rows > cta_count()) {
        combine_rows<T, TileM, PackGqa, Varied, Sinks, Columns, false>(
            params, rows, i64(cta_index()) * kCombineWarps + warp_index(), i64(cta_count()) * kCombineWarps);
    } else {
        combine_rows<T, TileM, PackGqa, Varied, Sinks, Columns, true>(params, rows, cta_index(), cta_count());
    }
    wait_for_launches_before();  // CTAs without rows: no launch ends before the one before it
}

}  // namespace fa
