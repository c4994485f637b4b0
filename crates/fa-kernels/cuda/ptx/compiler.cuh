// Statements that generate no instruction and only restrict the compiler.
#pragma once
#include "types.cuh"

namespace fa {

// Keeps the compiler from moving memory accesses across this point.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }

// Makes `value` unknown to the compiler: nothing that depends on it is hoisted above this point.
__device__ __forceinline__ void opaque(u32& value) { asm volatile("" : "+r"(value)); }

}  // namespace fa
