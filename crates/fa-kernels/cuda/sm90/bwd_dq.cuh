// dQ in the SM90 backward: its f32 accumulators in global memory, and the dQ warps, one per consumer
// warpgroup, which add to them what the warpgroup leaves in shared memory or, where the warpgroup adds by
// itself, wait for its turns.
#pragma once
#include "attn/block_list.cuh"
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

// The loop of warpgroup `wg`'s dQ warp: adds the sums in shared memory to global memory, or stores the first
// sums of a tile (may_store_dq).
template <Sm90BwdConfig C>
__device__ __forceinline__ void bwd_add_dq(BwdStorage<C>& smem, const BwdParams& params,
                                           const Visibility<C.mask, C.varied>& visible,
                                           const BwdWork<C>& work, int wg) {
    using T = BwdTraits<C>;
    const auto& tile = work.tile;
    const BlockRange& range = work.range;
    const int walk = work.walk;
    const bool elected = elect_one();
    const u32 share = smem_address(smem.dq.tiles[0]) + wg * T::DqOrder::kShare * 4;
    const Blocks blocks = query_list<mask_tile_words<C>()>(params, tile.batch, tile.kv_head, tile.n_block);
    // Who stores is known when its sums are ready, not before.
    constexpr bool kLate = C.varied || claims_dq<C>();
    const bool first_is_stored =
        kLate
            ? stores_dq<C>(params)
            : stores_dq<C>(params, (tile.batch * params.shape.heads_kv + tile.kv_head) * params.head_splits +
                                       tile.split);
    // One past the tiles of queries whose first sums this tile stores. In persistent claiming kernels: one
    // past those that it claims before its sums are ready, because their last keys are its own and it comes
    // to them before all other tiles. (Elsewhere the early claim would spill registers, and in a ring or
    // under a program's mask any tile may come first.)
    constexpr bool kClaimsEarly = claims_dq<C>() && C.persistent && !walks_in_ring<C>() && !kMaskProgram;
    const int stored_end =
        first_is_stored && (!kLate || kClaimsEarly) ? stored_queries<C>(params, visible, tile, range) : 0;
#pragma unroll 1
    for (int head = tile.first_head; head < tile.end_head; ++head) {
#pragma unroll 1
        for (int step = range.begin; step < range.end; ++step) {
            const int place = query_block<C>(range, walk, step), m_block = blocks.at(place);
            bool stores = first_is_stored, claims = false;
            // Semaphores of this warpgroup's part of the tile: 0 counts the claims, 1 says that the first
            // sums are stored. A tile that reads the latter as set, before its own sums are ready, need not
            // claim.
            auto semaphore = [&](int of) {
                return dq_semaphore<dq_turns<C>()>(params, tile, head, m_block, 2 * wg + of);
            };
            if constexpr (kLate) {
                stores = false;
                if (claims_dq<C>() && first_is_stored && elected) {
                    const bool is_own = m_block < stored_end;
                    if (is_own) stores = atomic_add(semaphore(0), 1u) == 0;
                    claims = is_own || load_acquire(semaphore(1)) == 0;
                }
                warp_sync();
            } else if constexpr (may_store_dq<C>()) {
                stores = m_block < stored_end;
                // Waits for the storing tile of keys, which was drawn before this one.
                if (!C.deterministic && first_is_stored && !stores && elected)
                    wait_for_parts(dq_semaphore<1>(params, tile, head, m_block, 0), C.num_wg);
                warp_sync();
            }
#pragma unroll
            for (int slice = 0; slice < C.dq_slices; ++slice) {
                named_barrier_sync(kDqReady + wg, 128 + 32);
                if (elected) {
                    if constexpr (C.deterministic) {
                        if (slice == 0) {
                            bool has_sums;
                            if constexpr (kMaskProgram) {
                                has_sums =
                                    wait_for_rank(params, tile, head, m_block, blocks.rank(place), C.num_wg);
                            } else {
                                has_sums = wait_for_turn<C.tile_m, C.tile_n>(params, visible, tile, walk != 0,
                                                                             head, m_block, C.num_wg);
                            }
                            if constexpr (C.varied) stores = first_is_stored && !has_sums;
                        }
                    } else if (claims && slice == 0) {
                        if (m_block >= stored_end) stores = atomic_add(semaphore(0), 1u) == 0;
                        if (!stores) wait_for_parts(semaphore(1), 1);
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
            if (claims_dq<C>()) {
                if (stores && elected) {
                    bulk_wait();
                    red_release_increment(semaphore(1));
                }
            } else if ((C.deterministic || (stores && params.n_blocks > 1)) && elected) {
                bulk_wait();
                signal_next(params, tile, head, m_block);
            }
        }
    }
}

// The loop of warpgroup `wg`'s dQ warp in deterministic kernels without dQ in shared memory: it waits for
// each turn, lets the warpgroup add its sums, and ends the turn.
template <Sm90BwdConfig C>
__device__ __forceinline__ void bwd_take_turns(const BwdParams& params,
                                               const Visibility<C.mask, C.varied>& visible,
                                               const BwdWork<C>& work, int wg) {
    const auto& tile = work.tile;
    const BlockRange& range = work.range;
    const Blocks blocks = query_list<mask_tile_words<C>()>(params, tile.batch, tile.kv_head, tile.n_block);
    const bool elected = elect_one();
#pragma unroll 1
    for (int head = tile.first_head; head < tile.end_head; ++head) {
#pragma unroll 1
        for (int step = range.begin; step < range.end; ++step) {
            const int place = query_block<C>(range, work.walk, step), m_block = blocks.at(place);
            if (elected) {
                if constexpr (kMaskProgram) {
                    wait_for_rank(params, tile, head, m_block, blocks.rank(place), C.num_wg);
                } else {
                    wait_for_turn<C.tile_m, C.tile_n>(params, visible, tile, work.walk != 0, head, m_block,
                                                      C.num_wg);
                }
            }
            warp_sync();
            named_barrier_arrive(kDqFree + wg, 128 + 32);
            named_barrier_sync(kDqReady + wg, 128 + 32);
            if (elected) signal_next(params, tile, head, m_block);
        }
    }
}

}  // namespace fa::sm90
