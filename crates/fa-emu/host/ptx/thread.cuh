// Twin of cuda/ptx/thread.cuh.
#pragma once
#include "types.cuh"

namespace fa {

EMU_INLINE u32 thread_index() { return emu::view->thread; }
EMU_INLINE u32 cta_threads() { return emu::view->cta_threads; }
EMU_INLINE u32 cta_index() { return emu::view->cta; }
EMU_INLINE u32 cta_count() { return emu::view->ctas; }
EMU_INLINE int lane_index() { return emu::view->lane; }
// A shuffle on the GPU, so that the whole warp has to ask.
EMU_INLINE int warp_index() { return int(emu::shuffle(u32(emu::view->warp), 0)); }
EMU_INLINE int thread_index_volatile() { return int(emu::view->thread); }
EMU_INLINE int cta_index_volatile() { return int(emu::view->cta); }
EMU_INLINE u32 cluster_cta_rank() { return emu::cluster_rank(); }

}  // namespace fa
