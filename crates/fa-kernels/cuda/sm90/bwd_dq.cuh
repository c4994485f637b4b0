// dQ of the SM90 backward: its accumulators' shares in global memory, and the warps, one for each consumer
// warpgroup, that add to them what the warpgroup leaves in shared memory.
#pragma once
#include "attn/bwd_tile.cuh"
#include "attn/query_range.cuh"
#include "attn/visibility.cuh"
#include "bwd_params.cuh"
#include "config.cuh"
#include "ptx/address.cuh"
#include "ptx/bulk.cuh"
#include "ptx/sync.cuh"
#include "ptx/warp.cuh"
#include "sm90/bwd_layout.cuh"

namespace fa::sm90 {

template <Sm90BwdConfig C>
__device__ __forceinline__ float* dq_share(const BwdParams& params, const Tile<C>& tile, int head,
                                           int m_block, int slice, int wg) {
    using T = BwdTraits<C>;
    return params.dq_accum + dq_tile(params, tile, head, m_block) * (C.tile_m * C.head_dim) +
           slice * T::DqOrder::kSlice + wg * T::DqOrder::kShare;
}

// Adds what warpgroup `wg` leaves in shared memory to global memory; of the first keys, stores it.
template <Sm90BwdConfig C>
__device__ __forceinline__ void bwd_add_dq(BwdStorage<C>& smem, const BwdParams& params,
                                           const Visibility<C.mask, C.varied>& visible, const Tile<C>& tile,
                                           const BlockRange& range, bool descending, int wg) {
    using T = BwdTraits<C>;
    const bool elected = elect_one();
    const u32 share = smem_address(smem.dq.tiles[0]) + wg * T::DqOrder::kShare * 4;
    const bool first_is_stored = stores_dq<C>(
        params, (tile.batch * params.shape.heads_kv + tile.kv_head) * params.head_splits + tile.split);
    named_barrier_arrive(kDqFree + wg, 128 + 32);
    for (int head = tile.first_head; head < tile.end_head; ++head) {
        for (int step = range.begin; step < range.end; ++step) {
            const int m_block = query_block(range, descending, step);
            bool stores = first_is_stored;
            if constexpr (may_store_dq<C>()) {
                const int first = m_block * C.tile_m;
                if (first_is_stored && params.n_blocks > 1) {
                    const int storing =
                        C.mask == MaskKind::Full
                            ? 0
                            : key_blocks<C.tile_n>(visible, first,
                                                   min(first + C.tile_m, visible.seqlen.q()) - 1)
                                      .end -
                                  1;
                    stores = tile.n_block == storing;
                    // That tile was drawn before this one.
                    if (!C.deterministic && !stores && elected)
                        wait_for_parts(dq_semaphore<1>(params, tile, head, m_block, 0), C.num_wg);
                }
                warp_sync();
            }
#pragma unroll
            for (int slice = 0; slice < C.dq_slices; ++slice) {
                named_barrier_sync(kDqReady + wg, 128 + 32);
                if (elected) {
                    if constexpr (C.deterministic) {
                        if (slice == 0) {
                            wait_for_turn<C.tile_m, C.tile_n>(params, visible, tile, descending, head,
                                                              m_block, C.num_wg);
                        }
                    }
                    float* const sums = dq_share<C>(params, tile, head, m_block, slice, wg);
                    if (stores) {
                        bulk_store(sums, share, T::DqOrder::kShare * 4);
                    } else {
                        bulk_add_f32(sums, share, T::DqOrder::kShare * 4);
                    }
                    bulk_commit();
                    bulk_wait_read();
                }
                warp_sync();
                named_barrier_arrive(kDqFree + wg, 128 + 32);
            }
            if ((C.deterministic || (stores && params.n_blocks > 1)) && elected) {
                bulk_wait();
                signal_next(params, tile, head, m_block);
            }
        }
    }
}

}  // namespace fa::sm90
