// What tcgen05's products take: operands in shared memory by descriptors, and what they multiply by an
// instruction descriptor (PTX ISA, "tcgen05", "Matrix descriptors", "Instruction descriptor").
#pragma once
#include "config.cuh"
#include "tile/descriptor.cuh"
#include "types.cuh"

namespace fa {

// wgmma's descriptors with the constant 1 at bit 46: the codes of the swizzles are the same bits.
constexpr u32 kTensorDescriptor = 1u << 14;

template <class Tile>
__device__ __forceinline__ Descriptor tensor_k_major(u32 address) {
    Descriptor descriptor = descriptor_k_major<Tile>(address);
    descriptor.high |= kTensorDescriptor;
    return descriptor;
}

template <class Tile>
__device__ __forceinline__ Descriptor tensor_mn_major(u32 address) {
    Descriptor descriptor = descriptor_mn_major<Tile>(address);
    descriptor.high |= kTensorDescriptor;
    return descriptor;
}

// f32 sums of 128 rows and `n` columns by operands of type T; A is K-major, B K-major or N-major.
template <Dtype T>
__host__ __device__ constexpr u32 tensor_instruction(int n, bool b_n_major) {
    static_assert(T == Dtype::F16 || T == Dtype::Bf16);
    constexpr u32 kSumsF32 = 1u << 4, kOperands = T == Dtype::Bf16 ? 1u << 7 | 1u << 10 : 0u;
    return kSumsF32 | kOperands | static_cast<u32>(b_n_major) << 16 | static_cast<u32>(n / 8) << 17 |
           128u / 16 << 24;
}

}  // namespace fa
