// Which query a row of a tile is.
#pragma once
#include "attn/seqlen.cuh"
#include "params.cuh"

namespace fa {

// With packing, a row is (query, head within the K/V head's group), the head running fastest; without, a row
// is a query.
template <bool PackGqa>
struct Rows {
    int group;  // heads that share the tile: the group size with packing, else 1

    __device__ __forceinline__ explicit Rows(const ShapeParams& shape)
        : group(PackGqa ? shape.group_size : 1) {}

    template <bool Varied>
    __device__ __forceinline__ int count(const Seqlen<Varied>& seqlen) const {
        return seqlen.q() * group;
    }

    __device__ __forceinline__ int query(int row) const { return PackGqa ? row / group : row; }

    // Query head of the row, where `head` is the tile's K/V head with packing, its query head without.
    __device__ __forceinline__ int head(int row, int head) const {
        return PackGqa ? head * group + row % group : head;
    }
};

}  // namespace fa
