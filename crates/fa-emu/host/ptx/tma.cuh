// Twin of cuda/ptx/tma.cuh.
#pragma once
#include "params.cuh"
#include "ptx/mbarrier.cuh"
#include "types.cuh"

namespace fa {

enum class L2Policy : u64 {
    EvictFirst = 0x12f0000000000000ull,
    EvictLast = 0x14f0000000000000ull,
};

EMU_INLINE void tma_prefetch_map(const TensorMap&) {}

EMU_INLINE void tma_load_4d(void* dst, const TensorMap& map, Mbarrier& bar, int c0, int c1, int c2, int c3,
                            L2Policy) {
    const int at[4] = {c0, c1, c2, c3};
    emu::tma_load(dst, &map, &bar, at, 4, 0);
}
EMU_INLINE void tma_load_4d_multicast(void* dst, const TensorMap& map, Mbarrier& bar, int c0, int c1, int c2,
                                      int c3, L2Policy, u16 blocks) {
    const int at[4] = {c0, c1, c2, c3};
    emu::tma_load(dst, &map, &bar, at, 4, blocks);
}
EMU_INLINE void tma_store_4d(const TensorMap& map, u32 src, int c0, int c1, int c2, int c3, L2Policy) {
    const int at[4] = {c0, c1, c2, c3};
    emu::tma_store(&map, src, at, 4);
}
EMU_INLINE void tma_load_5d(void* dst, const TensorMap& map, Mbarrier& bar, int c0, int c1, int c2, int c3,
                            int c4, L2Policy) {
    const int at[5] = {c0, c1, c2, c3, c4};
    emu::tma_load(dst, &map, &bar, at, 5, 0);
}

}  // namespace fa
