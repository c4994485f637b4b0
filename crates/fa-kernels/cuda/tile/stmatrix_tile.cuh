// Stores the accumulators of a 64-row tile, rounded to 16 bits, as a panel tile: an A operand of wgmma.
#pragma once
#include "ptx/math.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/panel.cuh"

namespace fa {

// Swizzles a byte offset within a panel: chunks of 16 bytes are XORed with the row within the swizzle atom,
// as TMA and wgmma define it (log2(RowBytes / 16) bits, taken from bit 7 up and XORed in from bit 4 up).
template <int RowBytes>
__device__ __forceinline__ u32 swizzled(u32 offset) {
    constexpr u32 kChunks = RowBytes / 16;
    return offset ^ ((offset >> 7) % kChunks << 4);
}

// Stores the 16 rows of warp `warp` of the warpgroup: 2 * Registers columns.
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
