// The mapping from rows of a tile to queries and heads.
#pragma once
#include "attn/seqlen.cuh"
#include "fwd_params.cuh"
#include "types.cuh"

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

    // The end of a tile's rows: of `rows` rows a tile, fewer than tile_m where packed groups leave some
    // unused.
    template <bool Varied>
    __device__ __forceinline__ int end(const Seqlen<Varied>& seqlen, int m_block, int rows) const {
        return PackGqa ? min((m_block + 1) * rows, count(seqlen)) : count(seqlen);
    }

    __device__ __forceinline__ int query(int row) const { return PackGqa ? row / group : row; }

    // Query head of the row, where `head` is the tile's K/V head with packing, its query head without.
    __device__ __forceinline__ int head(int row, int head) const {
        return PackGqa ? head * group + row % group : head;
    }

    // The same without a division where the group is a power of two, for code that has no use of the
    // quotient.
    __device__ __forceinline__ int head_alone(int row, int head) const {
        const bool masks = (group & (group - 1)) == 0;
        return PackGqa && masks ? head * group + (row & (group - 1)) : this->head(row, head);
    }
};

// Queries of a tile of `TileM` rows. With packed heads it has as many as fit it with all heads of a group:
// rows behind them, if tile_m is no multiple of the group, are of no query.
template <bool PackGqa, int TileM>
__device__ __forceinline__ int tile_queries(const FwdParams& params) {
    return PackGqa ? params.tile_queries : TileM;
}

// Rows of these queries.
template <bool PackGqa, int TileM>
__device__ __forceinline__ int tile_rows(const FwdParams& params) {
    return PackGqa ? params.tile_queries * params.shape.group_size : TileM;
}

// Of a tile's queries the first and the last.
struct QueryEnds {
    int first, last;

    template <bool Varied>
    __device__ __forceinline__ QueryEnds(const Seqlen<Varied>& seqlen, int m_block, int queries)
        : first(m_block * queries), last(min(first + queries, seqlen.q()) - 1) {}
};

}  // namespace fa
