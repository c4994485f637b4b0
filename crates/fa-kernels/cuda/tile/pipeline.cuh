// A ring of shared-memory stages between a producer and its consumers.
#pragma once
#include "ptx/mbarrier.cuh"

namespace fa {

// A role's position in the ring. The producer starts with the inverted phase, so that its first round does
// not wait.
template <int Stages>
struct PipelineState {
    int stage = 0;
    u32 phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == Stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// full: TMA's bytes, or each producer warp's copies, are in; empty: every consumer warp has read them. With
// Ctas > 1 a stage is filled by all CTAs of a cluster, so that it is free only when the consumers of all of
// them have read theirs.
template <int Stages, int Ctas = 1>
struct PipelineBarriers {
    Mbarrier full[Stages];
    Mbarrier empty[Stages];

    __device__ __forceinline__ void init(u32 consumer_warps, u32 producers = 1) {
        for (int i = 0; i < Stages; ++i) {
            mbarrier_init(full[i], producers);
            mbarrier_init(empty[i], consumer_warps * Ctas);
        }
    }

    // Producer: waits for a free stage and announces the bytes to come.
    __device__ __forceinline__ void acquire(const PipelineState<Stages>& state, u32 bytes) {
        mbarrier_wait(empty[state.stage], state.phase ^ 1);
        mbarrier_arrive_expect(full[state.stage], bytes);
    }

    // The same in two steps, for several threads that load: all wait, and one announces.
    __device__ __forceinline__ void wait_empty(const PipelineState<Stages>& state) {
        mbarrier_wait(empty[state.stage], state.phase ^ 1);
    }
    __device__ __forceinline__ bool is_empty(const PipelineState<Stages>& state) {
        return mbarrier_test(empty[state.stage], state.phase ^ 1);
    }
    __device__ __forceinline__ void announce(const PipelineState<Stages>& state, u32 bytes) {
        mbarrier_arrive_expect(full[state.stage], bytes);
    }

    __device__ __forceinline__ void wait_full(const PipelineState<Stages>& state) {
        mbarrier_wait(full[state.stage], state.phase);
    }

    // Consumer: the whole warp, once its reads are done; `elected` in one lane.
    __device__ __forceinline__ void release(const PipelineState<Stages>& state, bool elected) {
        if (!elected) return;
        if constexpr (Ctas == 1) {
            mbarrier_arrive(empty[state.stage]);
        } else {
#pragma unroll
            for (int rank = 0; rank < Ctas; ++rank) mbarrier_arrive_remote(empty[state.stage], rank);
        }
    }
};

}  // namespace fa
