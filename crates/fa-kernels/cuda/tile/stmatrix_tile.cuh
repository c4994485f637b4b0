// Accumulators of a 64-row tile, rounded to 16 bits and stored as a panel tile: an A operand of wgmma.
#pragma once
#include "ptx/math.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/panel.cuh"

namespace fa {

// Byte offset within a tile whose rows are swizzled over their width: 16-byte chunks are XORed with the row
// of the atom. (Swizzle of B = log2(row bytes / 16) bits at 16-byte granularity, source bits at 128 bytes, as
// TMA and wgmma define it.)
template <int RowBytes>
__device__ __forceinline__ u32 swizzled(u32 offset) {
    constexpr u32 kChunks = RowBytes / 16;
    return offset ^ ((offset >> 7) % kChunks << 4);
}

// Warp `warp` of the warpgroup stores its 16 rows; N = 2 * registers columns.
template <Dtype T, class Tile, int Registers>
__device__ __forceinline__ void store_accumulator_tile(u32 base, const float (&s)[Registers], int warp,
                                                       int lane) {
#pragma unroll
    for (int i = 0; i < Registers / 8; ++i) {
        // One k16 step: matrices (rows 0-7, columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
        const int row = 16 * warp + lane % 16;
        const int column = 16 * i + lane / 16 * 8;
        const u32 panel = column / Tile::kPanel * Tile::kPanelBytes;
        const u32 within = row * Tile::kRowBytes + column % Tile::kPanel * 2;
        const float* f = s + 8 * i;
        stmatrix_x4(base + panel + swizzled<Tile::kRowBytes>(within), pack<T>(f[0], f[1]),
                    pack<T>(f[2], f[3]), pack<T>(f[4], f[5]), pack<T>(f[6], f[7]));
    }
}

}  // namespace fa
