// The CUDA words for a host compiler: included ahead of every unit.
#pragma once
#include <cmath>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "interface.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__
#define __align__(n) __attribute__((aligned(n)))

#define EMU_INLINE inline __attribute__((always_inline))

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
EMU_INLINE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
EMU_INLINE int min(int a, int b) { return a < b ? a : b; }
EMU_INLINE int max(int a, int b) { return a > b ? a : b; }

namespace emu {

// Calls an entry as a launch does, with its own copies of the parameters.
template <class... Parameter, size_t... Index>
void call(void (*entry)(Parameter...), const void* const* arguments, std::index_sequence<Index...>) {
    entry(*static_cast<const std::remove_cv_t<Parameter>*>(arguments[Index])...);
}
template <class... Parameter>
void call(void (*entry)(Parameter...), const void* const* arguments) {
    call(entry, arguments, std::index_sequence_for<Parameter...>{});
}

}  // namespace emu
