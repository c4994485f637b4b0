// Twin of cuda/ptx/registers.cuh.
#pragma once

namespace fa {

template <int Count>
EMU_INLINE void setmaxnreg_dec() {
    static_assert(Count >= 24 && Count <= 256 && Count % 8 == 0);
    emu::set_registers(Count, false);
}
template <int Count>
EMU_INLINE void setmaxnreg_inc() {
    static_assert(Count >= 24 && Count <= 256 && Count % 8 == 0);
    emu::set_registers(Count, true);
}

}  // namespace fa
