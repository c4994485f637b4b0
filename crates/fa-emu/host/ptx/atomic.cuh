// Twin of cuda/ptx/atomic.cuh.
#pragma once
#include "types.cuh"

namespace fa {

constexpr bool kVectorRed = __CUDA_ARCH__ >= 900;

EMU_INLINE u32 atomic_add(u32* counter, u32 value) { return emu::atomic_add(counter, value); }
EMU_INLINE void red_add_f32(float* dst, float value) { emu::add_global(dst, &value, 1); }
EMU_INLINE void red_add_f32x4(float* dst, float a, float b, float c, float d) {
    const float values[4] = {a, b, c, d};
    emu::add_global(dst, values, 4);
}
EMU_INLINE u32 load_acquire(const u32* semaphore) { return emu::load_acquire(semaphore); }
EMU_INLINE void red_release_increment(u32* semaphore) { emu::add_release(semaphore, 1); }

}  // namespace fa
