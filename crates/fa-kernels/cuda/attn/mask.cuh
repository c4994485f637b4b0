// Masks scores: sets those of keys that a query does not see to -inf.
#pragma once
#include "attn/visibility.cuh"
#include "config.cuh"
#include "ptx/math.cuh"

namespace fa {

// The visible columns of a thread's two accumulator rows, relative to the thread's first column.
struct ColumnLimits {
    int begin[2], end[2];
};

// Masks an accumulator fragment. Register i holds row (i / 2) % 2 of the thread's two rows, and column 8 * (i
// / 4) + i % 2 relative to its first (PTX ISA, wgmma "Matrix fragments for D"; mma.m16n8k16 has the same
// order).
template <bool CheckBegin, bool CheckEnd, int N>
__device__ __forceinline__ void mask_scores(float (&s)[N], const ColumnLimits& limits) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int row = (i >> 1) & 1;
        const int column = 8 * (i / 4) + (i & 1);
        const bool hidden =
            (CheckEnd && column >= limits.end[row]) || (CheckBegin && column < limits.begin[row]);
        s[i] = hidden ? minus_infinity() : s[i];
    }
}

// Masks a tile of S: the thread's row r is query query_of(r), its first column key `first_key`.
template <MaskKind Mask, bool Varied, int N, class QueryOf>
__device__ __forceinline__ void mask_tile(float (&s)[N], const Visibility<Mask, Varied>& visible,
                                          const QueryOf& query_of, int first_key) {
    ColumnLimits limits;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        limits.begin[r] = visible.keys_begin(query_of(r)) - first_key;
        limits.end[r] = visible.keys_end(query_of(r)) - first_key;
    }
    mask_scores<Mask == MaskKind::Window, true>(s, limits);
}

// Masks a tile of S^T: the thread's row r is key `first_key` + 8 r, its first column query `first_query`.
// Keys past the end of the sequence are masked for all `TileM` queries.
template <int TileM, MaskKind Mask, bool Varied, int N>
__device__ __forceinline__ void mask_tile_transposed(float (&s)[N], const Visibility<Mask, Varied>& visible,
                                                     int first_key, int first_query) {
    ColumnLimits limits;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int key = first_key + 8 * r;
        limits.begin[r] = key < visible.seqlen.k() ? visible.queries_begin(key) - first_query : TileM;
        limits.end[r] = visible.queries_end(key) - first_query;
    }
    mask_scores<true, Mask == MaskKind::Window>(s, limits);
}

}  // namespace fa
