// Twin of cuda/ptx/stmatrix.cuh.
#pragma once
#include "types.cuh"

namespace fa {

EMU_INLINE void stmatrix_x4(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    const u32 m[4] = {m0, m1, m2, m3};
    emu::stmatrix(address, m, 4, false);
}
EMU_INLINE void stmatrix_x2(u32 address, u32 m0, u32 m1) {
    const u32 m[2] = {m0, m1};
    emu::stmatrix(address, m, 2, false);
}
EMU_INLINE void stmatrix_x4_trans(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    const u32 m[4] = {m0, m1, m2, m3};
    emu::stmatrix(address, m, 4, true);
}
EMU_INLINE void stmatrix_x2_trans(u32 address, u32 m0, u32 m1) {
    const u32 m[2] = {m0, m1};
    emu::stmatrix(address, m, 2, true);
}

}  // namespace fa
