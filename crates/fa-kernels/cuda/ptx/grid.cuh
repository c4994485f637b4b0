// Order between a launch and the one before it, which may overlap (PTX ISA, "griddepcontrol"). Both do
// nothing in launches that were not made for it, and on GPUs before 9.0, which have no such launches.
#pragma once
#include "types.cuh"

namespace fa {

// Waits until the launches before have ended; what they wrote is then visible.
__device__ __forceinline__ void wait_for_launches_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next launch start once all CTAs have called this or have ended.
__device__ __forceinline__ void let_next_launch_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace fa
