// Copies tiles from global to shared memory by cp.async, 16 bytes per thread and instruction.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/thread.cuh"
#include "tile/smem_tile.cuh"
#include "types.cuh"

namespace fa {

// Copies tiles of one tensor by the threads [FirstThread, FirstThread + Threads). Neighbouring lanes copy
// neighbouring chunks of a row, up to 128 bytes of it, so that a quarter warp reads whole cache lines and
// writes every bank once.
template <class Tile, int Threads, int FirstThread = 0>
struct TileCopy {
    static constexpr int kRowChunks = Tile::kColumns / 8;
    static constexpr int kLanes = kRowChunks % 8 == 0 ? 8 : kRowChunks % 4 == 0 ? 4 : 2;
    static constexpr int kSweep = Threads / kLanes;  // rows copied at once
    static constexpr int kSweeps = ceil_div(Tile::kRows, kSweep);
    static constexpr int kPieces = kRowChunks / kLanes;
    static constexpr int kPieceBytes =
        Tile::kSwizzled ? Tile::kPanelBytes : kLanes * 16;  // distance between pieces

    const u16* tensor;  // row 0
    i64 row_stride;     // elements
    int columns;        // of the tensor: a multiple of 8 up to the tile's

    // Starts to copy the tensor's rows, from row `row` on, to the tile at `address`. Columns beyond the
    // tensor's, and rows from `end` on, become zeros; with `Ragged` false all rows lie before `end`.
    template <bool Ragged>
    __device__ __forceinline__ void start(u32 address, int row, int end) const {
        // Lane and row are recomputed at each call: registers are scarcer than instructions.
        const int thread = thread_index_volatile() - FirstThread;
        const int lane = thread % kLanes, first_row = thread / kLanes;
        const u16* from = tensor + row * row_stride + (first_row * row_stride + lane * 8);
        const u32 to = address + Tile::offset(first_row, lane * 8);
#pragma unroll
        for (int sweep = 0; sweep < kSweeps; ++sweep) {
            const int tile_row = first_row + sweep * kSweep;
            if (Tile::kRows % kSweep != 0 && tile_row >= Tile::kRows) break;
            // The swizzle repeats every 8 rows.
            const u32 sweep_to = kSweep % 8 == 0 ? to + sweep * kSweep * Tile::kRowBytes
                                                 : address + Tile::offset(tile_row, lane * 8);
            const bool inside = !Ragged || row + tile_row < end;
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
                const bool copied = inside && (piece * kLanes + lane) * 8 < columns;
                cp_async_16(sweep_to + piece * kPieceBytes, from + piece * kLanes * 8, copied ? 16 : 0);
            }
            from += kSweep * row_stride;
        }
    }
};

}  // namespace fa
