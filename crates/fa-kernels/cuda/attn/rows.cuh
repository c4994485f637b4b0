// The mapping from rows of a tile to queries and heads.
#pragma once
#include "attn/seqlen.cuh"
#include "fwd_params.cuh"
#include "types.cuh"

namespace fa {

// The mapping of one launch. With PackGqa a row is (query, head within the K/V head's group), the head
// fastest; without it a row is a query.
template <bool PackGqa>
struct Rows {
    int group;  // heads that share a tile: the group size with PackGqa, else 1

    __device__ __forceinline__ explicit Rows(const ShapeParams& shape)
        : group(PackGqa ? shape.group_size : 1) {}

    template <bool Varied>
    __device__ __forceinline__ int count(const Seqlen<Varied>& seqlen) const {
        return seqlen.q() * group;
    }

    // One past the last row of a tile. A tile has `rows` rows, fewer than tile_m where the packed groups
    // leave some unused.
    template <bool Varied>
    __device__ __forceinline__ int end(const Seqlen<Varied>& seqlen, int m_block, int rows) const {
        return PackGqa ? min((m_block + 1) * rows, count(seqlen)) : count(seqlen);
    }

    __device__ __forceinline__ int query(int row) const { return PackGqa ? row / group : row; }

    // The row's query head. `head` is the tile's K/V head with PackGqa, else its query head.
    __device__ __forceinline__ int head(int row, int head) const {
        return PackGqa ? head * group + row % group : head;
    }

    // The same without a division where the group is a power of two, for code that does not need the
    // quotient.
    __device__ __forceinline__ int head_alone(int row, int head) const {
        const bool masks = (group & (group - 1)) == 0;
        return PackGqa && masks ? head * group + (row & (group - 1)) : this->head(row, head);
    }
};

// Queries per tile of `TileM` rows. With PackGqa these are as many as fit with all heads of the group; if
// tile_m is not a multiple of the group, the rows after them are unused.
template <bool PackGqa, int TileM>
__device__ __forceinline__ int tile_queries(const FwdParams& params) {
    return PackGqa ? params.tile_queries : TileM;
}

// Rows that these queries use.
template <bool PackGqa, int TileM>
__device__ __forceinline__ int tile_rows(const FwdParams& params) {
    return PackGqa ? params.tile_queries * params.shape.group_size : TileM;
}

// The first and the last query of a tile.
struct QueryEnds {
    int first, last;

    template <bool Varied>
    __device__ __forceinline__ QueryEnds(const Seqlen<Varied>& seqlen, int m_block, int queries)
        : first(m_block * queries), last(min(first + queries, seqlen.q()) - 1) {}
};

}  // namespace fa
