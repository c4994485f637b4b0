// The tiles of keys that a tile of queries visits: the device's form of fa_core::Mask::n_blocks.
#pragma once
#include "config.cuh"
#include "params.cuh"
#include "types.cuh"

namespace fa {

// Visit [begin, end); only [full_begin, full_end) needs no mask.
struct BlockRange {
    int begin, end, full_begin, full_end;

    __device__ __forceinline__ bool empty() const { return begin >= end; }
    __device__ __forceinline__ bool needs_mask(int block) const { return block < full_begin || block >= full_end; }
};

// `Params` is FwdParams or BwdParams here and below. First and one past the last visible key of a query, before clamping to [0, seqlen_k].
template <MaskKind Mask, class Params>
__device__ __forceinline__ int keys_begin(const Params& params, int query) {
    if (Mask != MaskKind::Window || params.shape.window_left < 0) return 0;
    return query + params.shape.seqlen_k - params.shape.seqlen_q - params.shape.window_left;
}

template <MaskKind Mask, class Params>
__device__ __forceinline__ int keys_end(const Params& params, int query) {
    if (Mask == MaskKind::Full || (Mask == MaskKind::Window && params.shape.window_right < 0)) return params.shape.seqlen_k;
    const int right = Mask == MaskKind::Causal ? 0 : params.shape.window_right;
    return min(params.shape.seqlen_k, query + params.shape.seqlen_k - params.shape.seqlen_q + right + 1);
}

// For the queries [first, last], both within the sequence.
template <MaskKind Mask, int TileN, class Params>
__device__ __forceinline__ BlockRange block_range(const Params& params, int first, int last) {
    const int begin = max(0, keys_begin<Mask>(params, first));
    const int end = max(0, keys_end<Mask>(params, last));
    const int full_begin = max(0, keys_begin<Mask>(params, last));
    const int full_end = max(0, keys_end<Mask>(params, first));
    BlockRange range;
    range.begin = begin / TileN;
    range.end = begin < end ? ceil_div(end, TileN) : range.begin;
    range.full_begin = ceil_div(full_begin, TileN);
    range.full_end = full_end / TileN;
    return range;
}

}  // namespace fa
