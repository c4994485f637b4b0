// Programmatic dependent launch: a grid starts before the one launched before it has ended, where the launch
// allows it (PTX ISA, "griddepcontrol"; from compute capability 9.0 on, and without effect before).
#pragma once
#include "types.cuh"

namespace fa {

// Lets the next grid start once every CTA of this one has come here or ended.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the grid launched before has ended; what it wrote is visible afterwards.
__device__ __forceinline__ void wait_for_prior_grid() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace fa
