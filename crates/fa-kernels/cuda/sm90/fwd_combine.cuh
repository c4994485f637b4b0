// Split keys whose parts are computed by the CTAs of a cluster: each leaves its partial result in shared
// memory and combines some of the tile's rows.
#pragma once
#include "attn/epilogue.cuh"
#include "attn/rows.cuh"
#include "attn/scheduler.cuh"
#include "attn/seqlen.cuh"
#include "attn/split.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/cluster.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "sm90/fwd_layout.cuh"
#include "sm90/fwd_tiles.cuh"
#include "types.cuh"

namespace fa::sm90 {

// The most CTAs of a cluster on every GPU that has clusters (CUDA C++ Programming Guide, "Thread Block
// Clusters").
constexpr int kMaxClusterParts = 8;

// The named barrier of the consumers; 1 to 3 are for ping-pong.
constexpr int kPartsBarrier = 4;

// Columns between the rows of partial results in shared memory, so that rows begin in other banks.
constexpr int kPartialPadding = 8;

// Partial results in the place of K and V.
template <Sm90FwdConfig C>
__device__ __forceinline__ PartialRows shared_rows(SharedStorage<C>& smem, const FwdParams& params) {
    float* lse = reinterpret_cast<float*>(smem.k[0]);
    return {lse + C.tile_m, lse, params.shape.head_dim_v + kPartialPadding};
}

// Where the CTA's partial results go: the tile's slot of the workspace, or, in a cluster, the place of K and
// V, once all consumers have read them.
template <Sm90FwdConfig C>
__device__ __forceinline__ PartialRows partial_rows(SharedStorage<C>& smem, const FwdParams& params,
                                                    const WorkTile& tile, int heads) {
    if constexpr (Traits<C>::kPartsInClusters) {
        if (cluster_cta_count() > 1) {
            named_barrier_sync(kPartsBarrier, 128 * C.num_wg);
            return shared_rows<C>(smem, params);
        }
    }
    return workspace_rows(params, tile, heads);
}

// store_nothing_partial() for a part of the cluster: O is zero, as ClusterRow loads it with LSE.
template <Sm90FwdConfig C>
__device__ __forceinline__ void store_no_part(SharedStorage<C>& smem, const FwdParams& params,
                                              const WorkTile& tile, int heads, int row, int end,
                                              int row_in_tile) {
    const PartialRows rows = partial_rows<C>(smem, params, tile, heads);
    store_nothing_partial(rows, row, end, row_in_tile);
    if constexpr (Traits<C>::kPartsInClusters) {
        if (cluster_cta_count() == 1) return;
        for (int r = 0; r < 2; ++r) {
            if (row + 8 * r >= end) continue;
            float* out = rows.out + (row_in_tile + 8 * r) * rows.stride;
            for (int column = 4 * (thread_index() % 4); column < params.shape.head_dim_v; column += 16)
                *reinterpret_cast<float4*>(out + column) = {};
        }
    }
}

// The result of a row over all parts of the cluster, by one warp: 4 columns of each lane.
struct ClusterRow {
    float4 out = {};
    float lse;

    // Combines row `row` of the CTAs' `partial` results, and with `sink` its logit.
    __device__ __forceinline__ ClusterRow(const PartialRows& partial, int row, float sink, int columns) {
        const int lane = lane_index(), ctas = cluster_cta_count();
        const float of_part = lane < ctas ? load_of_cluster(partial.lse + row, lane) : minus_infinity();
        const float* own = partial.out + row * partial.stride + 4 * lane;
        float4 parts[kMaxClusterParts];
#pragma unroll
        for (int i = 0; i < kMaxClusterParts; ++i) {
            if (i < ctas && 4 * lane < columns)
                parts[i] = load_of_cluster(reinterpret_cast<const float4*>(own), i);
        }
        float top = fmaxf(of_part, sink);
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) top = fmaxf(top, shuffle_xor(top, mask));
        // Without a finite LSE the row saw no key.
        const float base = top == minus_infinity() ? 0.f : top;
        float weight = exp2_approx((of_part - base) * kLog2e);
        float sum = weight;
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
        sum += exp2_approx((sink - base) * kLog2e);
        weight *= sum > 0.f ? 1.f / sum : 0.f;
        lse = base + logf(sum);
#pragma unroll
        for (int i = 0; i < kMaxClusterParts; ++i) {
            const float factor = shuffle_from(weight, i);
            // A part without a visible key.
            if (factor == 0.f) continue;
            out.x += factor * parts[i].x;
            out.y += factor * parts[i].y;
            out.z += factor * parts[i].z;
            out.w += factor * parts[i].w;
        }
    }
};

// Combines the rows of a tile after all consumers of the cluster have stored their partial results: into O
// and LSE, or, where the tile has more parts than the cluster has CTAs, into a partial result in the
// workspace.
template <Sm90FwdConfig C>
__device__ __forceinline__ void combine_in_cluster(SharedStorage<C>& smem, const FwdParams& params,
                                                   int heads) {
    named_barrier_sync(kPartsBarrier, 128 * C.num_wg);
    cluster_publish(thread_index() == 128);
    // The work tile is recomputed: the mainloop has no registers to keep it in.
    const WorkTile tile = cluster_tile<C>(params, heads);
    const auto seqlen = Seqlen<false>::of(params, tile.batch);
    const PartialRows partial = shared_rows<C>(smem, params);
    const int ctas = cluster_cta_count(), columns = params.shape.head_dim_v, column = 4 * lane_index();
    const int tile_rows = fa::tile_rows<C.pack_gqa, C.tile_m>(params);
    const int first = tile.m_block * tile_rows;
    const Rows<C.pack_gqa> rows(params.shape);
    const int end = min(rows.end(seqlen, tile.m_block, tile_rows), first + tile_rows);
    const bool is_whole = params.split.splits == 1;
#pragma unroll 1
    for (int row = cluster_cta_rank() + ctas * (warp_index() - 4); first + row < end;
         row += ctas * 4 * C.num_wg) {
        float sink = minus_infinity();
        if constexpr (C.sinks) {
            if (is_whole) sink = params.mods.sinks[rows.head(first + row, tile.head)];
        }
        const ClusterRow result(partial, row, sink, columns);
        const OutputRow<C.pack_gqa> target(params, seqlen, first + row, end, tile.head, tile.batch);
        const PartialRows slot = workspace_rows(params, tile, heads);
        if (column < columns) {
            if (is_whole) {
                u32* to = reinterpret_cast<u32*>(target.out + column);
                to[0] = pack<C.dtype>(result.out.x, result.out.y);
                to[1] = pack<C.dtype>(result.out.z, result.out.w);
            } else {
                *reinterpret_cast<float4*>(slot.out + i64(row) * columns + column) = result.out;
            }
        }
        if (column != 0) continue;
        if (!is_whole) {
            slot.lse[row] = result.lse;
        } else if (params.lse != nullptr) {
            params.lse[target.lse] = result.lse;
        }
    }
    cluster_leave();
}

}  // namespace fa::sm90
