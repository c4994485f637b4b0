// Twin of cuda/ptx/bulk.cuh.
#pragma once
#include "ptx/address.cuh"
#include "ptx/mbarrier.cuh"
#include "types.cuh"

namespace fa {

EMU_INLINE void bulk_load(void* dst, const void* src, u32 bytes, Mbarrier& bar) {
    emu::bulk_load(dst, src, bytes, &bar);
}
EMU_INLINE void bulk_add_f32(float* dst, u32 src, u32 bytes) { emu::bulk_add(dst, src, bytes); }
EMU_INLINE void bulk_store(void* dst, u32 src, u32 bytes) { emu::bulk_store(dst, src, bytes); }
EMU_INLINE void bulk_commit() { emu::bulk_commit(); }
EMU_INLINE void bulk_wait_read() { emu::bulk_wait(true); }
EMU_INLINE void bulk_wait() { emu::bulk_wait(false); }

}  // namespace fa
