// Twin of cuda/ptx/compiler.cuh: nothing to restrain, for the machine is called through functions that the
// compiler cannot see into.
#pragma once
#include "types.cuh"

namespace fa {

EMU_INLINE void compiler_fence() {}
EMU_INLINE void opaque(u32&) {}

}  // namespace fa
