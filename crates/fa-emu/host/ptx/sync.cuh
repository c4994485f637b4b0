// Twin of cuda/ptx/sync.cuh.
#pragma once
#include "types.cuh"

namespace fa {

EMU_INLINE void cta_sync() { emu::barrier(0, 0, true, true); }
EMU_INLINE void named_barrier_sync(int id, int threads) { emu::barrier(id, threads, true, true); }
EMU_INLINE void named_barrier_sync_unaligned(int id, int threads) { emu::barrier(id, threads, true, false); }
EMU_INLINE void named_barrier_arrive(int id, int threads) { emu::barrier(id, threads, false, true); }
EMU_INLINE void cluster_sync() { emu::cluster_barrier(true); }
EMU_INLINE void fence_gpu() { emu::fence_device(); }
EMU_INLINE void fence_async_shared() { emu::fence_async(); }
EMU_INLINE void pause() { emu::pause(); }

}  // namespace fa
