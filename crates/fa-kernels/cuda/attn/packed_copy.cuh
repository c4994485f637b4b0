// Copies tiles of Q to shared memory by cp.async: of one head, or with PackGqa of all query heads of a group.
#pragma once
#include "attn/rows.cuh"
#include "attn/seqlen.cuh"
#include "attn/tensor_view.cuh"
#include "fwd_params.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/thread.cuh"
#include "tile/copy_tile.cuh"
#include "types.cuh"

namespace fa {

// The queries of one sequence and head: TileCopy from the sequence's first row on.
template <bool PackGqa, class Tile, int Threads>
struct QueryCopy : TileCopy<Tile, Threads> {
    template <bool Varied>
    __device__ __forceinline__ static QueryCopy of(const FwdParams& params, const Seqlen<Varied>& seqlen,
                                                   int batch, int head) {
        return {{view(params.q).row(batch, seqlen.q_offset(), head), params.q.strides.seq,
                 params.shape.head_dim}};
    }
};

// With PackGqa, rows alternate between the query heads that share the K/V head.
template <class Tile, int Threads>
struct QueryCopy<true, Tile, Threads> {
    using Copy = TileCopy<Tile, Threads>;

    const FwdParams& params;
    const u16* queries;  // of the group's first head

    template <bool Varied>
    __device__ __forceinline__ static QueryCopy of(const FwdParams& params, const Seqlen<Varied>& seqlen,
                                                   int batch, int head) {
        const int first_head = Rows<true>(params.shape).head(0, head);
        return {params, view(params.q).row(batch, seqlen.q_offset(), first_head)};
    }

    // As TileCopy::start.
    template <bool Ragged>
    __device__ __forceinline__ void start(u32 address, int row, int end) const {
        const Rows<true> rows(params.shape);
        const RowStrides& strides = params.q.strides;
        const int thread = thread_index_volatile();
        const int lane = thread % Copy::kLanes, first_row = thread / Copy::kLanes;
#pragma unroll
        for (int sweep = 0; sweep < Copy::kSweeps; ++sweep) {
            const int tile_row = first_row + sweep * Copy::kSweep;
            if (Tile::kRows % Copy::kSweep != 0 && tile_row >= Tile::kRows) break;
            const int own = row + tile_row;
            const bool inside = !Ragged || own < end;
            const u16* from =
                queries + rows.query(own) * strides.seq + rows.head(own, 0) * strides.head + lane * 8;
            const u32 to = address + Tile::offset(tile_row, lane * 8);
#pragma unroll
            for (int piece = 0; piece < Copy::kPieces; ++piece) {
                const bool copied = inside && (piece * Copy::kLanes + lane) * 8 < params.shape.head_dim;
                cp_async_16(to + piece * Copy::kPieceBytes, from + piece * Copy::kLanes * 8, copied ? 16 : 0);
            }
        }
    }
};

}  // namespace fa
