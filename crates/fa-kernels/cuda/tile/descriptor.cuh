// wgmma's 64-bit shared-memory matrix descriptors (PTX ISA, "Matrix descriptor"): address, offsets, swizzle.
#pragma once
#include "ptx/compiler.cuh"
#include "types.cuh"

namespace fa {

// Where an operand starts. The high word is a constant of the tile's shape; the low word holds the address
// and moves with the stage and the k step.
struct Descriptor {
    u32 low, high;

    // The operand `bytes` (a multiple of 16) after this one.
    __device__ __forceinline__ u64 at(u32 bytes) const {
        return static_cast<u64>(high) << 32 | (low + (bytes >> 4));
    }

    // The operand in another buffer, `bytes` further on.
    __device__ __forceinline__ Descriptor moved(u32 bytes) const { return {low + (bytes >> 4), high}; }

    // The same descriptor, unknown to the compiler: without this it computes the descriptors of all k steps
    // ahead of the loop over key blocks and holds (or spills) two registers for each.
    __device__ __forceinline__ Descriptor recomputed() const {
        Descriptor copy = *this;
        opaque(copy.low);
        return copy;
    }
};

// Byte distance of 8-row groups in bits 32-45, swizzle of 128, 64 or 32 byte rows in bits 62-63.
template <int RowBytes>
__host__ __device__ constexpr u32 descriptor_high() {
    static_assert(RowBytes == 128 || RowBytes == 64 || RowBytes == 32);
    return static_cast<u32>(RowBytes == 128 ? 1 : RowBytes == 64 ? 2 : 3) << 30 | 8 * RowBytes >> 4;
}

// The address field has 14 bits of 16 bytes; the bits above are the CTA's rank in its cluster.
__device__ __forceinline__ u32 descriptor_address(u32 address) { return (address & 0x3ffff) >> 4; }

// Operand whose contraction (K) axis is contiguous: groups of 8 rows are adjacent; no leading offset.
template <class Tile>
__device__ __forceinline__ Descriptor descriptor_k_major(u32 address) {
    return {descriptor_address(address) | 1u << 16, descriptor_high<Tile::kRowBytes>()};
}

// Operand whose M or N axis is contiguous: panels are kPanelBytes in size and follow one another, groups of 8
// k are adjacent.
template <class Tile>
__device__ __forceinline__ Descriptor descriptor_mn_major(u32 address) {
    static_assert(Tile::kPanelBytes >> 4 < 1 << 14);
    return {descriptor_address(address) | static_cast<u32>(Tile::kPanelBytes >> 4) << 16,
            descriptor_high<Tile::kRowBytes>()};
}

}  // namespace fa
