// Twin of cuda/ptx/segment.cuh.
#pragma once
#include "types.cuh"

namespace fa {

template <int Width, typename T>
EMU_INLINE T shuffle_within(T value, int lane) {
    return __builtin_bit_cast(
        T, emu::shuffle(__builtin_bit_cast(u32, value), emu::view->lane / Width * Width + lane));
}

}  // namespace fa
