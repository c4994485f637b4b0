// Reallocation of registers between warpgroups (PTX ISA, "setmaxnreg"). All warps of a warpgroup execute it,
// in the branch of their role; the CTA's total must fit the register file.
#pragma once

namespace fa {

// Returns registers to the CTA's pool, keeping `Count` per thread.
template <int Count>
__device__ __forceinline__ void setmaxnreg_dec() {
    static_assert(Count >= 24 && Count <= 256 && Count % 8 == 0);
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

// Raises the warpgroup to `Count` registers per thread, waiting until the pool has them.
template <int Count>
__device__ __forceinline__ void setmaxnreg_inc() {
    static_assert(Count >= 24 && Count <= 256 && Count % 8 == 0);
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

}  // namespace fa
