// The range of key tiles that a tile of queries visits: fa_core::Mask::n_blocks on the device.
#pragma once
#include "attn/visibility.cuh"
#include "config.cuh"
#include "types.cuh"

namespace fa {

// The tiles to visit are [begin, end); those in [full_begin, full_end) need no mask.
struct BlockRange {
    int begin, end, full_begin, full_end;

    __device__ __forceinline__ bool empty() const { return begin >= end; }
    __device__ __forceinline__ bool needs_mask(int block) const {
        return block < full_begin || block >= full_end;
    }
};

// The range for the queries [first, last], both within the sequence.
template <int TileN, MaskKind Mask, bool Varied>
__device__ __forceinline__ BlockRange key_blocks(const Visibility<Mask, Varied>& visible, int first,
                                                 int last) {
    const int begin = max(0, visible.keys_begin(first));
    const int end = max(0, visible.keys_end(last));
    const int full_begin = max(0, visible.keys_begin(last));
    const int full_end = max(0, visible.keys_end(first));
    BlockRange range;
    range.begin = begin / TileN;
    range.end = begin < end ? ceil_div(end, TileN) : range.begin;
    range.full_begin = ceil_div(full_begin, TileN);
    range.full_end = full_end / TileN;
    return range;
}

// Part `split` of `splits` of a range. Parts differ by at most one tile.
__device__ __forceinline__ BlockRange part_of(const BlockRange& all, int split, int splits) {
    const int count = max(all.end - all.begin, 0), each = count / splits, more = count % splits;
    BlockRange range = all;
    range.begin = all.begin + split * each + min(split, more);
    range.end = range.begin + each + (split < more);
    return range;
}

}  // namespace fa
