// Copies tiles of K or V to shared memory by cp.async, from a tensor or from the pages of a cache.
#pragma once
#include "attn/seqlen.cuh"
#include "attn/tensor_view.cuh"
#include "fwd_params.cuh"
#include "ptx/atomic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/thread.cuh"
#include "tile/copy_tile.cuh"
#include "types.cuh"

namespace fa {

// The keys of one sequence and head in a contiguous tensor: TileCopy from the sequence's first row on.
template <bool Paged, class Tile, int Threads>
struct KeyCopy : TileCopy<Tile, Threads> {
    template <bool Varied>
    __device__ __forceinline__ static KeyCopy of(const FwdParams& params, const ConstTensor& tensor,
                                                 const Seqlen<Varied>& seqlen, int batch, int head,
                                                 int columns) {
        return {{view(tensor).row(batch, seqlen.k_offset(), head), tensor.strides.seq, columns}};
    }
};

// Keys in pages of any size: the page of every row is looked up. Rows past the end become zeros, and so do
// rows whose table entry is not a page of the cache, which are counted in page_faults.
template <class Tile, int Threads>
struct KeyCopy<true, Tile, Threads> {
    using Rows = TileCopy<Tile, Threads>;

    const VarlenParams& varlen;
    const RowStrides& strides;  // of the cache; from page to page: batch
    const u16* cache;           // row 0 of page 0
    const int* table;           // the sequence's row
    int columns;

    template <bool Varied>
    __device__ __forceinline__ static KeyCopy of(const FwdParams& params, const ConstTensor& tensor,
                                                 const Seqlen<Varied>&, int batch, int head, int columns) {
        return {params.varlen, tensor.strides, view(tensor).row(0, 0, head),
                params.varlen.page_table + i64(batch) * params.varlen.table_stride, columns};
    }

    // As TileCopy::start.
    template <bool Ragged>
    __device__ __forceinline__ void start(u32 address, int row, int end) const {
        const int thread = thread_index_volatile();
        const int lane = thread % Rows::kLanes, first_row = thread / Rows::kLanes;
#pragma unroll
        for (int sweep = 0; sweep < Rows::kSweeps; ++sweep) {
            const int tile_row = first_row + sweep * Rows::kSweep;
            if (Tile::kRows % Rows::kSweep != 0 && tile_row >= Tile::kRows) break;
            const int key = row + tile_row;
            bool inside = !Ragged || key < end;
            int page = 0;
            if (inside) {
                page = table[key / varlen.page];
                inside = u32(page) < u32(varlen.pages);
                if (!inside) {
                    page = 0;
                    if (varlen.page_faults != nullptr && lane == 0) atomic_add(varlen.page_faults, 1u);
                }
            }
            const u16* from = cache + page * strides.batch + key % varlen.page * strides.seq + lane * 8;
            const u32 to = address + Tile::offset(tile_row, lane * 8);
#pragma unroll
            for (int piece = 0; piece < Rows::kPieces; ++piece) {
                const bool copied = inside && (piece * Rows::kLanes + lane) * 8 < columns;
                cp_async_16(to + piece * Rows::kPieceBytes, from + piece * Rows::kLanes * 8, copied ? 16 : 0);
            }
        }
    }
};

}  // namespace fa
