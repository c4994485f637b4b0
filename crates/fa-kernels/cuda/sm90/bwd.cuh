// Attention backward for SM90, warp-specialised. A CTA owns a tile of keys and loops over the tiles of
// queries that see it. One warp loads by TMA, consumer warpgroups multiply by wgmma, and one more warp per
// consumer warpgroup adds its part of dQ to global memory, unless the consumers add it themselves.
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
#include "sm90/bwd_tiles.cuh"

namespace fa {

template <Sm90BwdConfig C>
constexpr int sm90_bwd_smem_bytes = sizeof(sm90::BwdStorage<C>);

// `map_ds`: of the array whose gradient is dS, where the unit stores one.
template <Sm90BwdConfig C>
__device__ __forceinline__ void sm90_bwd(const BwdParams& params, const TensorMap& map_q,
                                         const TensorMap& map_k, const TensorMap& map_v,
                                         const TensorMap& map_do, const TensorMap* map_ds = nullptr) {
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
        if constexpr (C.persistent) {
            mbarrier_init(smem.draws.k_empty, T::kConsumerWarps);
            mbarrier_init(smem.draws.v_empty, T::kConsumerWarps);
            smem.draws.bars.init(T::kConsumerWarps + 1 + (C.dq_via_smem ? C.num_wg : 0));
        } else if constexpr (C.deterministic) {
            smem.ticket = atomic_add(params.tile_counter, 1u);
        }
        mbarrier_init_fence();
    }
    cta_sync();
    const bool elected = elect_one();
    sm90::BwdTiles<C> tiles(params, smem, elected);
    if (tiles.none()) return;

    if (warp < 4) {
        setmaxnreg_dec<T::kProducerRegs>();
        if (warp == 0) {
            if (elected) {
                sm90::BwdLoads<C> loads;
                auto load = [&](const sm90::BwdWork<C>& work, const auto& visible) {
                    if (!work.empty())
                        sm90::bwd_producer<C>(smem, params, visible.seqlen, work, loads, map_q, map_k, map_v,
                                              map_do);
                };
                tiles.template for_each<true>(load);
            }
        } else if (warp <= C.num_wg) {
            if constexpr (C.dq_via_smem) {
                bool is_first = true;
                tiles.for_each([&](const sm90::BwdWork<C>& work, const auto& visible) {
                    if (work.empty()) return;
                    if (is_first) named_barrier_arrive(sm90::kDqFree + warp - 1, 128 + 32);
                    is_first = false;
                    sm90::bwd_add_dq<C>(smem, params, visible, work, warp - 1);
                });
            } else if constexpr (C.deterministic) {
                tiles.for_each([&](const sm90::BwdWork<C>& work, const auto& visible) {
                    if (!work.empty()) sm90::bwd_take_turns<C>(params, visible, work, warp - 1);
                });
            }
        } else if (C.persistent && warp == 3) {
            tiles.draw();
        }
    } else {
        setmaxnreg_inc<T::kConsumerRegs>();
        sm90::BwdPlaces<C> places;
        tiles.for_each([&](const sm90::BwdWork<C>& work, const auto& visible) {
            if (work.empty()) {
                store_zero_gradients(params, visible.seqlen, work.tile, C.tile_n, thread_index() - 128,
                                     T::kConsumers);
                return;
            }
            sm90::BwdConsumer<C> consumer{smem,         params,    visible,      work.tile,
                                          work.range,   work.walk, warp / 4 - 1, warp % 4,
                                          lane_index(), elected,   map_ds,       places};
            consumer.main_loop();
            consumer.finish();
            places = consumer.places;
        });
    }
}

}  // namespace fa
