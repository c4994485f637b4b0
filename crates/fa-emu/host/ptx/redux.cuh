// Twin of cuda/ptx/redux.cuh.
#pragma once
#include "ptx/warp.cuh"
#include "types.cuh"

namespace fa {

EMU_INLINE int warp_sum(int value) {
    for (int mask = 1; mask < 32; mask *= 2) value += shuffle_xor(value, mask);
    return value;
}
EMU_INLINE int warp_max(int value) {
    for (int mask = 1; mask < 32; mask *= 2) {
        const int other = shuffle_xor(value, mask);
        value = other > value ? other : value;
    }
    return value;
}

}  // namespace fa
