// Twin of cuda/ptx/mbarrier.cuh.
#pragma once
#include "ptx/address.cuh"
#include "types.cuh"

namespace fa {

struct alignas(8) Mbarrier {
    u64 state;
};

EMU_INLINE void mbarrier_init(Mbarrier& bar, u32 arrivals) { emu::mbarrier_init(&bar, arrivals); }
EMU_INLINE void mbarrier_init_fence() { emu::mbarrier_init_fence(); }
EMU_INLINE void mbarrier_arrive(Mbarrier& bar) { emu::mbarrier_arrive(&bar, 0); }
EMU_INLINE void mbarrier_arrive_remote(Mbarrier& bar, u32 rank) { emu::mbarrier_arrive_remote(&bar, rank); }
EMU_INLINE void mbarrier_arrive_expect(Mbarrier& bar, u32 bytes) { emu::mbarrier_arrive(&bar, bytes); }
EMU_INLINE bool mbarrier_test(Mbarrier& bar, u32 parity) { return emu::mbarrier_test(&bar, parity); }
EMU_INLINE void mbarrier_wait(Mbarrier& bar, u32 parity) { emu::mbarrier_wait(&bar, parity); }

}  // namespace fa
