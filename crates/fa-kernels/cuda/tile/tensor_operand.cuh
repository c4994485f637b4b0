// tcgen05.mma's shared-memory descriptors and instruction descriptor (PTX ISA, "tcgen05", "Matrix
// descriptors", "Instruction descriptor").
#pragma once
#include "config.cuh"
#include "tile/descriptor.cuh"
#include "types.cuh"

namespace fa {

// Bit 46, which is always 1, is all that distinguishes these descriptors from wgmma's: both encode the
// swizzle in the same bits.
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

// Instruction descriptor for M = 128 and N = `n`, operands of type T, f32 accumulators. A is K-major; B is
// N-major if `b_n_major`, else K-major.
template <Dtype T>
__host__ __device__ constexpr u32 tensor_instruction(int n, bool b_n_major) {
    static_assert(T == Dtype::F16 || T == Dtype::Bf16);
    constexpr u32 kSumsF32 = 1u << 4, kOperands = T == Dtype::Bf16 ? 1u << 7 | 1u << 10 : 0u;
    return kSumsF32 | kOperands | static_cast<u32>(b_n_major) << 16 | static_cast<u32>(n / 8) << 17 |
           128u / 16 << 24;
}

}  // namespace fa
