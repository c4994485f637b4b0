// Twin of cuda/ptx/warp.cuh.
#pragma once
#include "types.cuh"

namespace fa {

template <typename T>
EMU_INLINE T shuffle_xor(T value, int mask) {
    return __builtin_bit_cast(T, emu::shuffle(__builtin_bit_cast(u32, value), emu::view->lane ^ mask));
}
template <typename T>
EMU_INLINE T shuffle_from(T value, int lane) {
    return __builtin_bit_cast(T, emu::shuffle(__builtin_bit_cast(u32, value), lane));
}
EMU_INLINE bool warp_any(bool predicate) { return emu::any(predicate); }
EMU_INLINE void warp_sync() { emu::sync_warp(); }
EMU_INLINE bool elect_one() { return emu::elect(); }

}  // namespace fa
