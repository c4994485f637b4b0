// Twin of cuda/ptx/tcgen05.cuh.
#pragma once
#include "ptx/mbarrier.cuh"
#include "types.cuh"

namespace fa::tcgen05 {

EMU_INLINE void alloc(u32& holder, u32 columns) { emu::tensor_alloc(&holder, columns); }
EMU_INLINE void relinquish() { emu::tensor_relinquish(); }
EMU_INLINE void dealloc(u32 address, u32 columns) { emu::tensor_dealloc(address, columns); }

EMU_INLINE void fence_before() { emu::tensor_fence_before(); }
EMU_INLINE void fence_after() { emu::tensor_fence_after(); }

template <int N>
EMU_INLINE void load(u32 (&r)[N], u32 address) {
    emu::tensor_load(r, N, address);
}
template <int N>
EMU_INLINE void store(u32 address, const u32 (&r)[N]) {
    emu::tensor_store(address, r, N);
}
EMU_INLINE void wait_load() { emu::tensor_wait_load(); }
template <int N>
EMU_INLINE void pin(u32 (&)[N]) {}
EMU_INLINE void wait_store() { emu::tensor_wait_store(); }

EMU_INLINE void mma_ss(u32 d, u64 a, u64 b, u32 instruction, bool accumulate) {
    emu::tensor_product({d, false, a, b, instruction, accumulate});
}
EMU_INLINE void mma_ts(u32 d, u32 a, u64 b, u32 instruction, bool accumulate) {
    emu::tensor_product({d, true, a, b, instruction, accumulate});
}
EMU_INLINE void commit(Mbarrier& bar) { emu::tensor_commit(&bar); }

}  // namespace fa::tcgen05
