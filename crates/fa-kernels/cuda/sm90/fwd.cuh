// Attention forward for SM90, warp-specialised: a producer warpgroup loads by TMA, and consumer warpgroups
// multiply by wgmma, 64 query rows each.
#pragma once
#include "attn/descales.cuh"
#include "attn/plan_few.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/grid.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm90/fwd_codes.cuh"
#include "sm90/fwd_consumer.cuh"
#include "sm90/fwd_gather.cuh"
#include "sm90/fwd_layout.cuh"
#include "sm90/fwd_pages.cuh"
#include "sm90/fwd_producer.cuh"

namespace fa {
namespace sm90 {

// The producer for keys in pages and for codes: loads K, or with `Values` Q and V.
template <Sm90FwdConfig C, bool Values>
__device__ __forceinline__ void load_pages(SharedStorage<C>& smem, const FwdParams& params,
                                           const TensorMap& map_q, const TensorMap& map, int member) {
    if constexpr (Traits<C>::kCodes) {
        produce_codes<C, Values>(smem, params, map_q, member);
    } else if constexpr (C.gather) {
        gather_pages<C, Values>(smem, params, map_q, map, member);
    } else {
        produce_pages<C, Values>(smem, params, map_q, map, member);
    }
}

}  // namespace sm90

template <Sm90FwdConfig C>
constexpr int sm90_fwd_smem_bytes = sizeof(sm90::SharedStorage<C>);

template <Sm90FwdConfig C, PlanRules R = PlanRules{}>
__device__ __forceinline__ void sm90_fwd(const FwdParams& params, const TensorMap& map_q,
                                         const TensorMap& map_k, const TensorMap& map_v) {
    using T = sm90::Traits<C>;
    auto& smem = shared_memory<sm90::SharedStorage<C>>();

    const int warp = warp_index();
    if (warp == 0 && elect_one()) {
        tma_prefetch_map(map_q);
        if constexpr (!T::kCodes) {
            tma_prefetch_map(map_k);
            tma_prefetch_map(map_v);
        }
        smem.q_bars.init(T::kConsumerWarps);
        smem.k_bars.init(T::kConsumerWarps, T::kLoadingWarps);
        smem.v_bars.init(T::kConsumerWarps, T::kLoadingWarps);
        // The producer's first warp draws tiles; all lanes of the other warps receive them.
        if constexpr (C.scheduler == Scheduler::Dynamic)
            smem.ticket.bars.init(32 * (T::kConsumerWarps + T::kProducerWarps - 1));
        mbarrier_init_fence();
    }
    if constexpr (C.own_plan) plan_for_itself<R>(params, smem.q);
    if constexpr (C.pack_gqa) sm90::clear_idle_rows<C>(smem, params);
    if constexpr (C.cluster_m > 1) {
        cluster_sync();
    } else {
        cta_sync();
    }

    if (warp < 4) {
        setmaxnreg_dec<T::kProducerRegs>();
        if constexpr (C.paged || T::kCodes) {
            const int member = warp % T::kPageWarps;
            if (warp < T::kPageWarps) {
                sm90::load_pages<C, false>(smem, params, map_q, map_k, member);
            } else if (warp < T::kProducerWarps) {
                sm90::load_pages<C, true>(smem, params, map_q, map_v, member);
            }
            if (C.split && warp < T::kProducerWarps) let_next_launch_start();
        } else if (warp == 0 && elect_one()) {
            sm90::produce<C>(smem, params, map_q, map_k, map_v);
            // Not before: CTAs of the combination that wait would crowd on idle SMs (NB-167).
            if constexpr (C.split) let_next_launch_start();
        }
    } else {
        setmaxnreg_inc<T::kConsumerRegs>();
        sm90::consume<C>(smem, params, warp / 4 - 1);
        // A CTA must not exit while consumers of other CTAs may arrive at its barriers. (Exited warps count
        // as arrived.)
        if constexpr (C.cluster_m > 1) cluster_sync();
    }
}

// The same for codes, which take no maps of K and V.
template <Sm90FwdConfig C, PlanRules R = PlanRules{}>
__device__ __forceinline__ void sm90_fwd(const WithCache& params, const TensorMap& map_q) {
    static_assert(sm90::Traits<C>::kCodes);
    sm90_fwd<C, R>(params, map_q, map_q, map_q);
}

}  // namespace fa
