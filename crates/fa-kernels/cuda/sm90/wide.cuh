// Attention forward for SM90 with heads wider than a warpgroup's registers: two warpgroups share the columns
// of O, and V may be the first columns of K (latents).
#pragma once
#include "attn/descales.cuh"
#include "attn/plan_few.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm90/wide_codes.cuh"
#include "sm90/wide_consumer.cuh"
#include "sm90/wide_layout.cuh"
#include "sm90/wide_load.cuh"
#include "sm90/wide_pages.cuh"

namespace fa {

template <Sm90WideConfig C>
constexpr int sm90_wide_smem_bytes = sizeof(wide::SharedStorage<C>);

template <Sm90WideConfig C, PlanRules R = PlanRules{}>
__device__ __forceinline__ void sm90_wide(const FwdParams& params, const TensorMap& map_q,
                                          const TensorMap& map_k, const TensorMap& map_v) {
    using T = wide::Traits<C>;
    auto& smem = shared_memory<wide::SharedStorage<C>>();

    const int warp = warp_index();
    if (warp == 0 && elect_one()) {
        tma_prefetch_map(map_q);
        if constexpr (!T::kCodes) {
            tma_prefetch_map(map_k);
            tma_prefetch_map(map_v);
        }
        smem.init_barriers();
    }
    if constexpr (C.own_plan) plan_for_itself<R>(params, smem.q);
    if constexpr (C.pack_gqa) wide::clear_idle_rows<C>(smem, params);
    cta_sync();

    if (warp < 4) {
        setmaxnreg_dec<T::kProducerRegs>();
        if constexpr (C.paged || T::kCodes) {
            if constexpr (T::kCodes) {
                wide::load_codes<C>(smem, params, map_q, warp);
            } else if constexpr (C.gather) {
                wide::gather_pages<C>(smem, params, map_q, warp);
            } else {
                wide::produce_pages<C>(smem, params, map_q, map_k, map_v, warp);
            }
            if constexpr (C.split) let_next_launch_start();
        } else if (warp == 0 && elect_one()) {
            wide::produce<C>(smem, params, map_q, map_k, map_v);
            // Not before: CTAs of the combination that wait would crowd on idle SMs (NB-167).
            if constexpr (C.split) let_next_launch_start();
        }
    } else {
        if constexpr (T::kFollowerRegs == T::kLeaderRegs) setmaxnreg_inc<T::kLeaderRegs>();
        if (warp < 8) {
            if constexpr (T::kFollowerRegs < T::kLeaderRegs) setmaxnreg_inc<T::kLeaderRegs>();
            wide::lead<C>(smem, params);
        } else {
            if constexpr (T::kFollowerRegs < T::kLeaderRegs) setmaxnreg_dec<T::kFollowerRegs>();
            wide::follow<C>(smem, params);
        }
    }
}

// The same for codes, which take no maps of K and V.
template <Sm90WideConfig C, PlanRules R = PlanRules{}>
__device__ __forceinline__ void sm90_wide(const WithCache& params, const TensorMap& map_q) {
    static_assert(wide::Traits<C>::kCodes);
    sm90_wide<C, R>(params, map_q, map_q, map_q);
}

}  // namespace fa
