// The tiles of queries that a tile of keys visits in the backward: the transpose of attn/block_range.cuh.
#pragma once
#include "attn/block_range.cuh"
#include "config.cuh"
#include "params.cuh"
#include "types.cuh"

namespace fa {

// First and one past the last query that sees `key`, before clamping to [0, seqlen_q].
template <MaskKind Mask>
__device__ __forceinline__ int queries_begin(const BwdParams& params, int key) {
    if (Mask == MaskKind::Full || (Mask == MaskKind::Window && params.shape.window_right < 0)) return 0;
    const int right = Mask == MaskKind::Causal ? 0 : params.shape.window_right;
    return key - (params.shape.seqlen_k - params.shape.seqlen_q) - right;
}

template <MaskKind Mask>
__device__ __forceinline__ int queries_end(const BwdParams& params, int key) {
    if (Mask != MaskKind::Window || params.shape.window_left < 0) return params.shape.seqlen_q;
    return min(params.shape.seqlen_q, key - (params.shape.seqlen_k - params.shape.seqlen_q) + params.shape.window_left + 1);
}

// For the tile of keys [first, first + TileN), of which only those before seqlen_k exist. In the tiles of queries within
// [full_begin, full_end) every query sees every key of the tile; queries past the end need no mask, their LSE hides them.
template <MaskKind Mask, int TileM, int TileN>
__device__ __forceinline__ BlockRange query_range(const BwdParams& params, int first) {
    const int last = min(first + TileN, params.shape.seqlen_k) - 1;
    const int begin = max(0, queries_begin<Mask>(params, first));
    const int end = max(0, queries_end<Mask>(params, last));
    const int full_begin = max(0, queries_begin<Mask>(params, last));
    const int full_end = max(0, queries_end<Mask>(params, first));
    BlockRange range;
    range.begin = begin / TileM;
    range.end = begin < end ? ceil_div(end, TileM) : range.begin;
    range.full_begin = ceil_div(full_begin, TileM);
    range.full_end = full_end == params.shape.seqlen_q ? ceil_div(full_end, TileM) : full_end / TileM;
    // The keys past the end of the sequence must be hidden everywhere.
    if (first + TileN > params.shape.seqlen_k) range.full_end = range.full_begin;
    return range;
}

}  // namespace fa
