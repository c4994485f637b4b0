// wgmma's 64-bit shared-memory matrix descriptors (PTX ISA, "Matrix descriptor"): address, offsets, swizzle.
#pragma once
#include "ptx/compiler.cuh"
#include "types.cuh"

namespace fa {

// An operand's descriptor. The high word is a constant of the tile's shape; the low word holds the address,
// which changes with the stage and the k step.
struct Descriptor {
    u32 low, high;

    // The operand `bytes` (a multiple of 16) after this one.
    __device__ __forceinline__ u64 at(u32 bytes) const {
        return static_cast<u64>(high) << 32 | (low + (bytes >> 4));
    }

    // The same descriptor, opaque to the compiler. Without this the compiler hoists the descriptors of all k
    // steps out of the loop over key tiles and holds (or spills) two registers for each.
    __device__ __forceinline__ Descriptor recomputed() const {
        Descriptor copy = *this;
        opaque(copy.low);
        return copy;
    }
};

// The high word: stride in bytes between groups of 8 rows in bits 32-45, swizzle (rows of 128, 64 or 32
// bytes) in bits 62-63.
template <int RowBytes>
__host__ __device__ constexpr u32 descriptor_high() {
    static_assert(RowBytes == 128 || RowBytes == 64 || RowBytes == 32);
    return static_cast<u32>(RowBytes == 128 ? 1 : RowBytes == 64 ? 2 : 3) << 30 | 8 * RowBytes >> 4;
}

// The address field: 14 bits in units of 16 bytes. The bits above them are the CTA's rank in its cluster.
__device__ __forceinline__ u32 descriptor_address(u32 address) { return (address & 0x3ffff) >> 4; }

// A K-major operand (the contraction axis is contiguous): groups of 8 rows are adjacent; the leading offset
// is not used.
template <class Tile>
__device__ __forceinline__ Descriptor descriptor_k_major(u32 address) {
    return {descriptor_address(address) | 1u << 16, descriptor_high<Tile::kRowBytes>()};
}

// An MN-major operand (the M or N axis is contiguous): panels of kPanelBytes follow one another; groups of 8
// k are adjacent.
template <class Tile>
__device__ __forceinline__ Descriptor descriptor_mn_major(u32 address) {
    static_assert(Tile::kPanelBytes >> 4 < 1 << 14);
    return {descriptor_address(address) | static_cast<u32>(Tile::kPanelBytes >> 4) << 16,
            descriptor_high<Tile::kRowBytes>()};
}

}  // namespace fa
