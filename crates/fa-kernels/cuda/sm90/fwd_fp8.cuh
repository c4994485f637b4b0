// Attention forward of e4m3 tensors for SM90, warp-specialised: a producer warpgroup loads by TMA and
// transposes V, and consumer warpgroups multiply by wgmma on 8 bits, 64 query rows each.
#pragma once
#include "attn/plan_few.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/grid.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm90/fp8_consumer.cuh"
#include "sm90/fp8_layout.cuh"
#include "sm90/fp8_producer.cuh"

namespace fa {

template <Sm90FwdFp8Config C>
constexpr int sm90_fwd_fp8_smem_bytes = sizeof(sm90::Fp8Storage<C>);

template <Sm90FwdFp8Config C, PlanRules R = PlanRules{}>
__device__ __forceinline__ void sm90_fwd_fp8(const FwdParams& params, const TensorMap& map_q,
                                             const TensorMap& map_k, const TensorMap& map_v) {
    using T = sm90::Fp8Traits<C>;
    auto& smem = shared_memory<sm90::Fp8Storage<C>>();

    const int warp = warp_index();
    if (warp == 0 && elect_one()) {
        tma_prefetch_map(map_q);
        tma_prefetch_map(map_k);
        tma_prefetch_map(map_v);
        smem.q_bars.init(T::kConsumerWarps);
        smem.k_bars.init(T::kConsumerWarps);
        smem.vt_bars.init(T::kConsumerWarps, T::kProducerWarps);
        smem.v_bars.init(T::kProducerWarps);
        // The producer's first warp draws tiles; all lanes of the other warps receive them.
        if constexpr (C.scheduler == Scheduler::Dynamic)
            smem.ticket.bars.init(32 * (T::kConsumerWarps + T::kProducerWarps - 1));
        mbarrier_init_fence();
    }
    if constexpr (C.own_plan) plan_for_itself<R>(params, smem.q);
    if constexpr (C.pack_gqa) sm90::clear_idle_rows8<C>(smem, params);
    cta_sync();

    if (warp < 4) {
        setmaxnreg_dec<T::kProducerRegs>();
        sm90::produce8<C>(smem, params, map_q, map_k, map_v, warp);
        // Not before: CTAs of the combination that wait would crowd on idle SMs (NB-167).
        if constexpr (C.split) let_next_launch_start();
    } else {
        setmaxnreg_inc<T::kConsumerRegs>();
        sm90::consume8<C>(smem, params, warp / 4 - 1);
    }
}

}  // namespace fa
