// The tiles of queries that a tile of keys visits in the backward: the transpose of attn/block_range.cuh.
#pragma once
#include "attn/block_range.cuh"
#include "attn/visibility.cuh"
#include "config.cuh"
#include "types.cuh"

namespace fa {

// The range for the keys [first, first + TileN), some of which may lie past the sequence's end. In the tiles
// [full_begin, full_end) every query sees every key; queries past the end are masked by their LSE.
template <int TileM, int TileN, MaskKind Mask, bool Varied>
__device__ __forceinline__ BlockRange query_blocks(const Visibility<Mask, Varied>& visible, int first) {
    const Seqlen<Varied>& seqlen = visible.seqlen;
    const int last = min(first + TileN, seqlen.k()) - 1;
    const int begin = max(0, visible.queries_begin(first));
    const int end = max(0, visible.queries_end(last));
    const int full_begin = max(0, visible.queries_begin(last));
    const int full_end = max(0, visible.queries_end(first));
    BlockRange range;
    range.begin = begin / TileM;
    range.end = begin < end ? ceil_div(end, TileM) : range.begin;
    range.full_begin = ceil_div(full_begin, TileM);
    range.full_end = full_end == seqlen.q() ? ceil_div(full_end, TileM) : full_end / TileM;
    // Keys past the end of the sequence must be masked in every tile.
    if (first + TileN > seqlen.k()) range.full_end = range.full_begin;
    return range;
}

}  // namespace fa
