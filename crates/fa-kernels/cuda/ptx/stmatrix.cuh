// Stores of accumulator-shaped fragments to shared memory (PTX ISA, "stmatrix").
#pragma once
#include "types.cuh"

namespace fa {

// Stores four 8x8 matrices of 16-bit elements. Lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0),
                 "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}

// Stores two matrices. Lanes 0 to 15 give the addresses.
__device__ __forceinline__ void stmatrix_x2(u32 address, u32 m0, u32 m1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(m0), "r"(m1)
                 : "memory");
}

// The same, each matrix stored transposed: the elements that lane l holds, at row l / 4 and columns 2 (l % 4)
// and 2 (l % 4) + 1, go to column l / 4 and those rows.
__device__ __forceinline__ void stmatrix_x4_trans(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(m0), "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}

__device__ __forceinline__ void stmatrix_x2_trans(u32 address, u32 m0, u32 m1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(m0),
                 "r"(m1)
                 : "memory");
}

}  // namespace fa
