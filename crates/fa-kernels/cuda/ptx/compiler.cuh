// Statements that generate no instruction and only restrict the compiler.
#pragma once
#include "types.cuh"

namespace fa {

// Memory accesses are not moved across it.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }

// Makes `value` unknown to the compiler: what is computed from it is computed after this point, not ahead of
// a loop.
__device__ __forceinline__ void opaque(u32& value) { asm volatile("" : "+r"(value)); }

}  // namespace fa
