// Loads of matrix fragments from shared memory (PTX ISA, "ldmatrix"). They are volatile, so that the compiler
// keeps them between the barriers around them. They need no memory clobber: the kernels that use them read
// shared memory in no other way.
#pragma once
#include "types.cuh"

namespace fa {

// Loads four 8x8 matrices of 16-bit elements. Lane i gives the address of row i % 8 of matrix i / 8; lane l
// receives row l / 4, columns 2 (l % 4) and 2 (l % 4) + 1, of each matrix.
__device__ __forceinline__ void ldmatrix_x4(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address));
}

// The same, each matrix transposed: lane l receives rows 2 (l % 4) and 2 (l % 4) + 1 of column l / 4.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address));
}

// Plain accesses of a 16-bit element, of a 32-bit word and of two consecutive words.
__device__ __forceinline__ u32 load_shared_u16(u32 address) {
    u16 value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ u32 load_shared_u32(u32 address) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ void load_shared_u32x2(u32& first, u32& second, u32 address) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(address));
}

__device__ __forceinline__ float load_shared_f32(u32 address) {
    return __int_as_float(load_shared_u32(address));
}

__device__ __forceinline__ void store_shared_u16(u32 address, u16 value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

__device__ __forceinline__ void store_shared_u32(u32 address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

}  // namespace fa
