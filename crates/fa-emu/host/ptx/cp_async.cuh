// Twin of cuda/ptx/cp_async.cuh.
#pragma once
#include "types.cuh"

namespace fa {

EMU_INLINE void cp_async_16(u32 dst, const void* src, int bytes) { emu::cp_async(dst, src, 16, bytes); }
EMU_INLINE void cp_async_4(u32 dst, const void* src, int bytes) { emu::cp_async(dst, src, 4, bytes); }
EMU_INLINE void cp_async_commit() { emu::cp_async_commit(); }
template <int Pending>
EMU_INLINE void cp_async_wait() {
    emu::cp_async_wait(Pending);
}

}  // namespace fa
