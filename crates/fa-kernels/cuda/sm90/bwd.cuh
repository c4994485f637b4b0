// Attention backward for SM90: a CTA owns a tile of keys and visits the tiles of queries that see it. One
// warp loads by TMA, the consumer warpgroups multiply by wgmma, and one more warp for each of them adds its
// share of dQ to global memory.
#pragma once
#include "attn/bwd_dsinks.cuh"
#include "attn/bwd_epilogue.cuh"
#include "attn/bwd_postprocess.cuh"
#include "attn/bwd_preprocess.cuh"
#include "attn/bwd_tile.cuh"
#include "attn/query_range.cuh"
#include "attn/seqlen.cuh"
#include "attn/visibility.cuh"
#include "bwd_params.cuh"
#include "config.cuh"
#include "ptx/atomic.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm90/bwd_consumer.cuh"
#include "sm90/bwd_dq.cuh"
#include "sm90/bwd_layout.cuh"
#include "sm90/bwd_producer.cuh"

namespace fa {

template <Sm90BwdConfig C>
constexpr int sm90_bwd_smem_bytes = sizeof(sm90::BwdStorage<C>);

template <Sm90BwdConfig C>
__device__ __forceinline__ void sm90_bwd(const BwdParams& params, const TensorMap& map_q,
                                         const TensorMap& map_k, const TensorMap& map_v,
                                         const TensorMap& map_do) {
    using T = sm90::BwdTraits<C>;
    auto& smem = shared_memory<sm90::BwdStorage<C>>();

    const int warp = warp_index();
    if (warp == 0 && elect_one()) {
        tma_prefetch_map(map_q);
        tma_prefetch_map(map_k);
        tma_prefetch_map(map_v);
        tma_prefetch_map(map_do);
        mbarrier_init(smem.k_full, 1);
        mbarrier_init(smem.v_full, 1);
        smem.q_bars.init(T::kConsumerWarps);
        smem.do_bars.init(T::kConsumers);
        if constexpr (C.deterministic) smem.ticket = atomic_add(params.tile_counter, 1u);
        mbarrier_init_fence();
    }
    cta_sync();
    const int index = C.deterministic ? smem.ticket : cta_index();
    if (C.varied && index >= bwd_blocks<C.varied>(params) * params.plan.heads) return;
    auto tile = bwd_tile_at<C>(params, index);
    const auto seqlen = Seqlen<C.varied>::of(params, tile.batch);
    if constexpr (C.varied) {
        tile.queries = WorkspacePlace::of_queries<C.tile_m>(params, seqlen, tile.batch);
        tile.keys = WorkspacePlace::of_keys<C.tile_n>(params, seqlen, tile.batch);
    }
    const Visibility<C.mask, C.varied> visible{params.shape, seqlen};
    const BlockRange range = query_blocks<C.tile_m, C.tile_n>(visible, tile.n_block * C.tile_n);
    const bool has_work = !range.empty() && tile.first_head < tile.end_head;
    const int walk = query_walk<C>(params, tile, seqlen.k(), range);

    if (warp < 4) {
        setmaxnreg_dec<T::kProducerRegs>();
        if (has_work && warp == 0) {
            if (elect_one()) {
                sm90::bwd_producer<C>(smem, params, seqlen, tile, range, walk, map_q, map_k, map_v, map_do);
            }
        } else if (has_work && warp <= C.num_wg) {
            if constexpr (C.dq_via_smem)
                sm90::bwd_add_dq<C>(smem, params, visible, tile, range, walk, warp - 1);
        }
    } else {
        setmaxnreg_inc<T::kConsumerRegs>();
        if (has_work) {
            sm90::BwdConsumer<C> consumer{smem, params,       visible,  tile,         range,
                                          walk, warp / 4 - 1, warp % 4, lane_index(), elect_one()};
            consumer.main_loop();
            consumer.finish();
        } else {
            store_zero_gradients(params, seqlen, tile, C.tile_n, thread_index() - 128, T::kConsumers);
        }
    }
}

}  // namespace fa
