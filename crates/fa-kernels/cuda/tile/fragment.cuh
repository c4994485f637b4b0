// Operands of mma.m16n8k16 from tiles in shared memory, by ldmatrix or by plain loads.
//
// All three operands of attention are read as blocks of 16 rows x 16 columns: Q as A, K as two n8 blocks of B
// stored [n][k], V as two n8 blocks of B stored [k][n].
#pragma once
#include "ptx/ldmatrix.cuh"
#include "ptx/thread.cuh"
#include "tile/smem_tile.cuh"
#include "types.cuh"

namespace fa {

// Which operand a block becomes, and how it is stored. AStoredKM is a transposed A: its blocks are
// (contraction, rows of A).
enum class Operand { A, AStoredKM, BStoredNK, BStoredKN };

// Reads a lane's fragments from tiles of one kind. ldmatrix puts into register i the matrix whose rows are
// addressed by lanes 8i to 8i + 7. The two registers of an n8 block of B must be adjacent, so K's matrices
// run along its columns first, and Q's and V's down the rows; those of a transposed A run along the columns
// of the stored tile.
template <class Tile, Operand O, bool Ldmatrix>
struct FragmentReader {
    // Byte offset of the lane's row. The bits of the chunk number (bit 4 and up) hold the swizzle that chunk
    // numbers are XORed with.
    u32 lane_offset;

    static_assert(Ldmatrix || O != Operand::AStoredKM, "only ldmatrix transposes an A");

    __device__ __forceinline__ explicit FragmentReader(int lane = lane_index()) {
        if constexpr (Ldmatrix) {
            constexpr bool kColumnsFirst = O == Operand::BStoredNK || O == Operand::AStoredKM;
            const int row = kColumnsFirst ? lane % 8 + lane / 16 * 8 : lane % 16;
            const int half = kColumnsFirst ? lane / 8 % 2 : lane / 16;
            lane_offset = row * Tile::kRowBytes + ((Tile::twist(row) ^ half) << 4);
        } else {
            const int row = O == Operand::BStoredKN ? lane % 4 * 2 : lane / 4;
            lane_offset = row * Tile::kRowBytes + (Tile::twist(row) << 4);
        }
    }

    // The lane's address in the block at (row, column), both multiples of 16, or 8 columns to the right of it
    // if `half` is 1. Tiles are 128-byte aligned, so that nothing else uses the chunk number's bits of an
    // address.
    __device__ __forceinline__ u32 locate(u32 address, int row, int column, int half) const {
        const u32 chunk = (Tile::chunk(column) + half) << 4;
        const u32 at = address + lane_offset;
        return (Tile::kSwizzled ? at ^ chunk : at + chunk) + row * Tile::kRowBytes +
               Tile::panel_offset(column);
    }

    // Reads the block at (row, column) of the tile at `address`: for A all four registers of the operand, for
    // B two registers of the first n8 block and two of the second.
    __device__ __forceinline__ void read(u32 (&regs)[4], u32 address, int row, int column) const {
        if constexpr (Ldmatrix) {
            const u32 at = locate(address, row, column, 0);
            if constexpr (O == Operand::BStoredKN || O == Operand::AStoredKM) {
                ldmatrix_x4_trans(regs, at);
            } else {
                ldmatrix_x4(regs, at);
            }
        } else if constexpr (O == Operand::BStoredKN) {
            // Rows 2t and 2t + 1 of column g of an n8 block; then 8 rows further, then 8 columns further.
            const u32 within = lane_index() / 4 * 2;
            const int t2 = lane_index() % 4 * 2;
            const u32 next_row = Tile::kRowBytes;
            const u32 next_twist = (Tile::twist(t2) ^ Tile::twist(t2 + 1)) << 4;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 at = locate(address, row + i % 2 * 8, column, i / 2);
                const u32 first = load_shared_u16(at + within);
                const u32 second = load_shared_u16((at ^ next_twist) + next_row + within);
                regs[i] = first | second << 16;
            }
        } else {
            // A: rows g and g + 8, then the same 8 columns further. B: the columns first, then the rows.
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int down = O == Operand::A ? i % 2 : i / 2;
                const int right = O == Operand::A ? i / 2 : i % 2;
                regs[i] =
                    load_shared_u32(locate(address, row + 8 * down, column, right) + lane_index() % 4 * 4);
            }
        }
    }
};

}  // namespace fa
