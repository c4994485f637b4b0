// Attention backward for SM80 and later, by cp.async and mma.sync. A CTA owns a tile of keys and loops over
// the tiles of queries that see it. Its warps form two groups: the P warps compute P, one tile of queries
// ahead, and dV; the dS warps compute dS and dK; each group computes a part of dQ. Each warp thus owns a
// larger part of each product, so that operands are read from shared memory less often, and one group's
// exponentials run under the other group's products.
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
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "sm80/bwd_ds_warps.cuh"
#include "sm80/bwd_group.cuh"
#include "sm80/bwd_layout.cuh"
#include "sm80/bwd_p_warps.cuh"

namespace fa {

template <Sm80BwdConfig C>
constexpr int sm80_bwd_smem_bytes = sizeof(sm80::BwdStorage<C>);

template <Sm80BwdConfig C>
__device__ __forceinline__ void sm80_bwd(const BwdParams& params) {
    auto& smem = shared_memory<sm80::BwdStorage<C>>();
    using Visible = Visibility<C.mask, C.varied>;
    if (thread_index() == 0) {
        // Deterministic kernels draw tiles from a counter: a tile then waits only for tiles drawn earlier,
        // which are running.
        const int index = C.deterministic ? atomic_add(params.tile_counter, 1u) : cta_index();
        if (C.varied && index >= bwd_blocks<C.varied>(params) * params.plan.heads) {
            smem.tile.n_block = -1;
        } else {
            smem.tile = bwd_tile_at<C>(params, index);
            const auto seqlen = Seqlen<C.varied>::of(params, smem.tile.batch);
            if constexpr (C.varied) {
                smem.tile.queries = WorkspacePlace::of_queries<C.tile_m>(params, seqlen, smem.tile.batch);
                smem.tile.keys = WorkspacePlace::of_keys<C.tile_n>(params, seqlen, smem.tile.batch);
                smem.seqlen = seqlen;
            }
            const Blocks blocks = query_list(params, smem.tile.batch, smem.tile.kv_head, smem.tile.n_block);
            smem.range = blocks.within(query_blocks<C.tile_m, C.tile_n>(Visible{params.shape, seqlen},
                                                                        smem.tile.n_block * C.tile_n));
            if constexpr (can_descend<C.mask, C.deterministic>())
                smem.descending = descends<C.mask, C.deterministic, C.varied>(params, smem.tile);
            for (sm80::BwdStep& step : smem.step) step = {smem.tile.first_head, smem.range.begin};
        }
    }
    cta_sync();
    if (C.varied && smem.tile.n_block < 0) return;
    const auto seqlen = Seqlen<C.varied>::of(params, smem.tile.batch);
    const Visible visible{params.shape, seqlen};
    if (smem.range.empty() || smem.tile.first_head >= smem.tile.end_head) {
        store_zero_gradients(params, seqlen, smem.tile, C.tile_n, thread_index(), cta_threads());
        return;
    }
    sm80::BwdGroup<C>{smem, params, visible}.load_first({smem.tile.first_head, smem.range.begin});
    if (thread_index() < sm80::BwdLayout<C>::kGroupThreads) {
        sm80::PWarps<C>{{smem, params, visible}}.main_loop();
    } else {
        sm80::DsWarps<C>{{smem, params, visible}}.main_loop();
    }
}

}  // namespace fa
