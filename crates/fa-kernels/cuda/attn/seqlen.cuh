// The lengths of one sequence and the offsets of its rows. Every header asks a Seqlen, never the parameters.
#pragma once
#include "params.cuh"
#include "types.cuh"

namespace fa {

// Made once per work tile, for the tile's sequence `batch`.
template <bool Varied = false>
struct Seqlen;

// Equal lengths for all sequences of a batch. Each use rereads the parameters, which costs no registers.
template <>
struct Seqlen<false> {
    const ShapeParams& shape;

    __device__ __forceinline__ Seqlen(const ShapeParams& shape, int /* batch */) : shape(shape) {}

    template <class Params>
    __device__ __forceinline__ static Seqlen of(const Params& params, int batch) {
        return Seqlen(params.shape, batch);
    }

    __device__ __forceinline__ int q() const { return shape.seqlen_q; }
    __device__ __forceinline__ int k() const { return shape.seqlen_k; }

    // Rows of the tensors before the sequence's first row.
    __device__ __forceinline__ int q_offset() const { return 0; }
    __device__ __forceinline__ int k_offset() const { return 0; }

    // Index of the LSE of the first query of `head`; the following queries follow it.
    __device__ __forceinline__ i64 lse_row(int batch, int head, int heads) const {
        return (i64(batch) * heads + head) * q();
    }
};

// Lengths on the device: packed sequences, given by their starts, and padded or paged ones, given by the
// number of rows in use.
template <>
struct Seqlen<true> {
    int queries, keys, first_query, first_key;
    int total_q, room_q;  // rows of all packed queries; rows allocated to each padded sequence

    // Offset and length of one side, queries or keys; `room` is a padded sequence's allocated rows.
    struct Side {
        int rows, first;

        __device__ __forceinline__ Side(const int* cu, const int* used, int room, int batch) {
            first = 0;
            rows = room;
            if (cu != nullptr) {
                first = cu[batch];
                rows = min(rows, cu[batch + 1] - first);
            }
            if (used != nullptr) rows = min(rows, used[batch]);
            rows = max(rows, 0);
        }
    };

    __device__ __forceinline__ static Seqlen of(const ShapeParams& shape, const VarlenParams& varlen,
                                                int batch) {
        const Side q(varlen.cu_q, varlen.used_q, shape.seqlen_q, batch);
        const Side k(varlen.cu_k, varlen.used_k, shape.seqlen_k, batch);
        return {q.rows, k.rows, q.first, k.first, varlen.total_q, shape.seqlen_q};
    }
    template <class Params>
    __device__ __forceinline__ static Seqlen of(const Params& params, int batch) {
        return of(params.shape, params.varlen, batch);
    }

    __device__ __forceinline__ int q() const { return queries; }
    __device__ __forceinline__ int k() const { return keys; }
    __device__ __forceinline__ int q_offset() const { return first_query; }
    __device__ __forceinline__ int k_offset() const { return first_key; }

    // LSE is `[heads, total_q]` for packed queries, `[batch, heads, seqlen_q]` for padded ones.
    __device__ __forceinline__ i64 lse_row(int batch, int head, int heads) const {
        return total_q > 0 ? i64(head) * total_q + first_query : (i64(batch) * heads + head) * room_q;
    }
};

}  // namespace fa
