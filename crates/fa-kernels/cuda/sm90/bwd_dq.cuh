// dQ of the SM90 backward: its accumulators' shares in global memory, and the warps, one for each consumer
// warpgroup, that add to them what the warpgroup leaves in shared memory.
#pragma once
#include "attn/bwd_tile.cuh"
#include "attn/query_range.cuh"
#include "attn/visibility.cuh"
#include "bwd_params.cuh"
#include "config.cuh"
#include "ptx/address.cuh"
#include "ptx/atomic.cuh"
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

// Adds what warpgroup `wg` leaves in shared memory to global memory; the first sums of a tile are stored.
template <Sm90BwdConfig C>
__device__ __forceinline__ void bwd_add_dq(BwdStorage<C>& smem, const BwdParams& params,
                                           const Visibility<C.mask, C.varied>& visible, const Tile<C>& tile,
                                           const BlockRange& range, int walk, int wg) {
    using T = BwdTraits<C>;
    const bool elected = elect_one();
    const u32 share = smem_address(smem.dq.tiles[0]) + wg * T::DqOrder::kShare * 4;
    const bool stores_first = stores_dq<C>(params);
    const bool claims = claims_dq<C>() && params.dq_semaphores != nullptr;
    named_barrier_arrive(kDqFree + wg, 128 + 32);
    for (int head = tile.first_head; head < tile.end_head; ++head) {
        for (int step = range.begin; step < range.end; ++step) {
            const int m_block = query_block<C>(range, walk, step);
            // Of this warpgroup's share: how many have claimed it, and whether the first one's sums are
            // there.
            unsigned* const claimed = dq_semaphore<dq_turns<C>()>(params, tile, head, m_block, 2 * wg);
            unsigned* const stored = claimed + 1;
            // All but the first few to come read that before their sums are ready.
            bool stores = stores_first && !claims && !C.deterministic;
            bool waits = claims;
            if (claims && elected) waits = load_acquire(stored) == 0;
            warp_sync();
#pragma unroll
            for (int slice = 0; slice < C.dq_slices; ++slice) {
                named_barrier_sync(kDqReady + wg, 128 + 32);
                if (elected) {
                    if (C.deterministic && slice == 0) {
                        stores = !wait_for_turn<C.tile_m, C.tile_n>(params, visible, tile, walk != 0, head,
                                                                    m_block, C.num_wg);
                    } else if (slice == 0 && waits) {
                        stores = atomic_add(claimed, 1u) == 0;
                        if (!stores) wait_for_parts(stored, 1);
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
            if ((C.deterministic || (stores && claims)) && elected) {
                bulk_wait();
                if constexpr (C.deterministic) {
                    signal_next(params, tile, head, m_block);
                } else {
                    count_part(stored);
                }
            }
        }
    }
}

}  // namespace fa::sm90
