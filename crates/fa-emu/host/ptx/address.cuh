// Twin of cuda/ptx/address.cuh.
#pragma once
#include "types.cuh"

namespace fa {

template <class T>
EMU_INLINE T& shared_memory() {
    return *reinterpret_cast<T*>(emu::shared_window);
}
EMU_INLINE u32 smem_address(const void* pointer) { return emu::shared_address(pointer); }
EMU_INLINE u32 smem_address_volatile(const void* pointer) { return emu::shared_address(pointer); }

}  // namespace fa
