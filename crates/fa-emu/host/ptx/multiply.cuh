// Twin of cuda/ptx/multiply.cuh.
#pragma once
#include "types.cuh"

namespace fa {

EMU_INLINE u32 high_product(u32 a, u32 b) { return u32(u64(a) * b >> 32); }

template <class T>
EMU_INLINE const T* bytes_after(const T* base, u32 count, u32 unit) {
    return reinterpret_cast<const T*>(reinterpret_cast<const u8*>(base) + u64(count) * unit);
}

}  // namespace fa
