// Attention forward for SM100: tcgen05 multiplies one or two tiles of 128 queries into tensor memory. Warps
// have the roles softmax, correction, products (MMA) and loads.
#pragma once
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/registers.cuh"
#include "ptx/sync.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm100/fwd_correction.cuh"
#include "sm100/fwd_layout.cuh"
#include "sm100/fwd_load.cuh"
#include "sm100/fwd_products.cuh"
#include "sm100/fwd_softmax.cuh"

namespace fa {

template <Sm100FwdConfig C>
constexpr int sm100_fwd_smem_bytes = sizeof(sm100::SharedStorage<C>);

template <Sm100FwdConfig C>
__device__ __forceinline__ void sm100_fwd(const FwdParams& params, const TensorMap& map_q,
                                          const TensorMap& map_k, const TensorMap& map_v) {
    using T = sm100::Traits<C>;
    auto& smem = shared_memory<sm100::SharedStorage<C>>();

    const int warp = warp_index();
    if (warp == T::kProductWarp) {
        tcgen05::alloc(smem.tensor, T::kColumns);
        tcgen05::relinquish();
    }
    if (warp == T::kLoadWarp && elect_one()) {
        tma_prefetch_map(map_q);
        tma_prefetch_map(map_k);
        tma_prefetch_map(map_v);
        smem.init_barriers();
    }
    cta_sync();
    const u32 base = smem.tensor;

    if (warp < T::kSoftmaxWarps) {
        setmaxnreg_inc<T::kSoftmaxRegs>();
        sm100::softmax<C>(smem, params, base, warp / 4);
    } else if (warp < T::kProductWarp) {
        setmaxnreg_dec<T::kCorrectionRegs>();
        sm100::correct<C>(smem, params, base);
    } else {
        setmaxnreg_dec<T::kOtherRegs>();
        if (warp == T::kProductWarp) {
            if (elect_one()) sm100::multiply<C>(smem, params, base);
        } else if (warp == T::kLoadWarp) {
            if (elect_one()) sm100::load<C>(smem, params, map_q, map_k, map_v);
        }
        warp_sync();
    }
    // No role uses tensor memory from here on.
    tcgen05::fence_before();
    cta_sync();
    tcgen05::fence_after();
    if (warp == T::kProductWarp) tcgen05::dealloc(base, T::kColumns);
}

}  // namespace fa
