// Moving registers between warpgroups (PTX ISA, "setmaxnreg"). Every warp of the warpgroup executes it, in
// one branch of the if/else over roles; the sum over the CTA must fit the register file.
#pragma once

namespace fa {

// Returns registers to the CTA's pool: `Count` remain per thread.
template <int Count>
__device__ __forceinline__ void setmaxnreg_dec() {
    static_assert(Count >= 24 && Count <= 256 && Count % 8 == 0);
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

// Takes registers from the pool, waiting until it has them: `Count` per thread.
template <int Count>
__device__ __forceinline__ void setmaxnreg_inc() {
    static_assert(Count >= 24 && Count <= 256 && Count % 8 == 0);
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

}  // namespace fa
