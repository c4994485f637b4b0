// The work tiles of a CTA of the SM90 backward: one, or in persistent kernels those that an otherwise idle
// warp draws from a counter and publishes to the other roles.
#pragma once
#include "attn/bwd_tile.cuh"
#include "attn/seqlen.cuh"
#include "attn/visibility.cuh"
#include "bwd_params.cuh"
#include "config.cuh"
#include "ptx/atomic.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "sm90/bwd_layout.cuh"
#include "tile/pipeline.cuh"

namespace fa::sm90 {

template <Sm90BwdConfig C, bool Persistent = C.persistent>
struct BwdTiles {
    const BwdParams& params;
    BwdStorage<C>& smem;
    BwdWork<C> work;
    int index;

    __device__ __forceinline__ BwdTiles(const BwdParams& params, BwdStorage<C>& smem, bool)
        : params(params), smem(smem), index(C.deterministic ? smem.ticket : cta_index()) {
        if (!none()) work = BwdWork<C>::of(params, index);
    }
    // Whether the CTA has no tile: with lengths on the device the grid is sized by an upper bound.
    __device__ __forceinline__ bool none() const {
        return C.varied && index >= bwd_blocks<C.varied>(params) * params.plan.heads;
    }
    // Calls `body` with each work tile of the CTA and its sequence's Visibility.
    template <bool Alone = false, class Body>
    __device__ __forceinline__ void for_each(const Body& body) const {
        body(work, Visibility<C.mask, C.varied>{params.shape, Seqlen<C.varied>::of(params, work.tile.batch)});
    }
    __device__ __forceinline__ void draw() const {}
};

template <Sm90BwdConfig C>
struct BwdTiles<C, true> {
    const BwdParams& params;
    BwdStorage<C>& smem;
    bool elected;

    __device__ __forceinline__ BwdTiles(const BwdParams& params, BwdStorage<C>& smem, bool elected)
        : params(params), smem(smem), elected(elected) {}
    __device__ __forceinline__ bool none() const { return false; }

    // Executed by whole warps or, with `Alone`, by the producer's thread alone.
    template <bool Alone = false, class Body>
    __device__ __forceinline__ void for_each(const Body& body) const {
        PipelineState<1> state;
        while (true) {
            smem.draws.bars.wait_full(state);
            if (smem.draws.is_last) break;
            const BwdWork<C> work = smem.draws.work;
            const Visibility<C.mask, C.varied> visible{params.shape, seqlen_of(work)};
            auto release = [&] {
                smem.draws.bars.release(state, elected);
                state.advance();
            };
            if constexpr (!Alone) {
                warp_sync();
                release();
            }
            body(work, visible);
            // The next tile is drawn once this one's loads are in flight, not earlier: another CTA may get to
            // it sooner.
            if constexpr (Alone) release();
        }
    }

    // The lengths of the published tile's sequence: to load them again would delay every role.
    __device__ __forceinline__ Seqlen<C.varied> seqlen_of(const BwdWork<C>& work) const {
        if constexpr (C.varied) {
            return smem.draws.seqlen;
        } else {
            return Seqlen<>::of(params, work.tile.batch);
        }
    }

    __device__ __forceinline__ int count() const {
        return C.varied ? bwd_blocks<C.varied>(params) * params.plan.heads : params.num_tiles;
    }

    // The loop of the drawing warp, which has no other role.
    __device__ __forceinline__ void draw() const {
        if (!elected) return;
        PipelineState<1> state;
        while (true) {
            smem.draws.bars.wait_empty(state);
            const int index = atomic_add(params.tile_counter, 1u);
            const bool is_last = index >= count();
            const BwdWork<C> work = is_last ? BwdWork<C>{} : BwdWork<C>::of(params, index);
            smem.draws.work = work;
            if constexpr (C.varied) {
                if (!is_last) smem.draws.seqlen = Seqlen<true>::of(params, work.tile.batch);
            }
            smem.draws.is_last = is_last;
            mbarrier_arrive(smem.draws.bars.full[0]);
            state.advance();
            if (is_last) break;
        }
    }
};

}  // namespace fa::sm90
