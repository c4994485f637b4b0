// The work tiles of a CTA of the SM100 forward: one or two tiles of 128 queries, and the tiles of keys that
// each of them visits. Every role computes them by itself.
#pragma once
#include "attn/block_range.cuh"
#include "attn/scheduler.cuh"
#include "attn/seqlen.cuh"
#include "attn/visibility.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/thread.cuh"
#include "sm100/fwd_layout.cuh"
#include "types.cuh"

namespace fa::sm100 {

template <Sm100FwdConfig C>
struct QueryTiles {
    using T = Traits<C>;
    WorkTile tile;
    Seqlen<C.varied> seqlen;
    BlockRange own[T::kTiles];  // key tiles of each tile of queries; empty if it has no queries
    int begin, end;             // their union, visited from the last to the first

    __device__ __forceinline__ QueryTiles(const FwdParams& params, int index)
        : tile(work_tile_at<C.tile_order, C.varied, false>(params, index, params.shape.heads_q)),
          seqlen(Seqlen<C.varied>::of(params, tile.batch)), begin(0), end(0) {
        const Visibility<C.mask, C.varied> visible{params.shape, seqlen};
#pragma unroll
        for (int t = 0; t < T::kTiles; ++t) {
            const int first = first_row(t), last = min(first + T::kRows, seqlen.q()) - 1;
            own[t] = first > last ? BlockRange{0, 0, 0, 0} : key_blocks<C.tile_n>(visible, first, last);
            if (own[t].empty()) continue;
            begin = end > 0 ? min(begin, own[t].begin) : own[t].begin;
            end = max(end, own[t].end);
        }
    }

    __device__ __forceinline__ int first_row(int t) const { return tile.m_block * C.tile_m + t * T::kRows; }
    __device__ __forceinline__ bool visits(int t, int block) const {
        return own[t].begin <= block && block < own[t].end;
    }
    __device__ __forceinline__ bool is_first(int t, int block) const { return block == own[t].end - 1; }
    __device__ __forceinline__ bool is_last(int t, int block) const { return block == own[t].begin; }
};

// Calls `each` with the number of each of the CTA's work tiles, in order.
template <Sm100FwdConfig C, class Each>
__device__ __forceinline__ void for_each_tile(const FwdParams& params, const Each& each) {
    const int count = work_tiles<C.varied>(params);
#pragma unroll 1
    for (int index = cta_index(); index < count; index += cta_count()) {
        each(index);
        if constexpr (C.scheduler == Scheduler::PerTile) break;
    }
}

}  // namespace fa::sm100
