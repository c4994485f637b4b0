// Moving registers between warp groups (PTX ISA, "setmaxnreg"). Every warp of the warp group executes it, in one branch
// of the role if/else; the sum over the block must fit the register file.
#pragma once

namespace fa {

template <int Count>
__device__ __forceinline__ void registers_give_back() {
    static_assert(Count >= 24 && Count <= 256 && Count % 8 == 0);
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

template <int Count>
__device__ __forceinline__ void registers_take() {
    static_assert(Count >= 24 && Count <= 256 && Count % 8 == 0);
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

}  // namespace fa
