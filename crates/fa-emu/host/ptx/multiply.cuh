// Twin of cuda/ptx/multiply.cuh.
#pragma once
#include "types.cuh"

namespace fa {

template <class T>
EMU_INLINE const T* bytes_after(const T* base, u32 count, u32 unit) {
    return reinterpret_cast<const T*>(reinterpret_cast<const u8*>(base) + u64(count) * unit);
}

}  // namespace fa
