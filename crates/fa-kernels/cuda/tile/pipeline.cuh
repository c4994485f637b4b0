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

// The barriers of a ring. full[i]: TMA's bytes, or all producer warps' copies, have arrived in stage i.
// empty[i]: every consumer warp has read it. With Ctas > 1 all CTAs of a cluster fill each stage by
// multicast, so that it is empty only when the consumers of all of them have read theirs.
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

    // Producer: waits until the stage is empty and announces the bytes to come.
    __device__ __forceinline__ void acquire(const PipelineState<Stages>& state, u32 bytes) {
        mbarrier_wait(empty[state.stage], state.phase ^ 1);
        mbarrier_arrive_expect(full[state.stage], bytes);
    }

    // acquire() in two steps, for several threads that load: all of them wait, and one announces the bytes.
    __device__ __forceinline__ void wait_empty(const PipelineState<Stages>& state) {
        mbarrier_wait(empty[state.stage], state.phase ^ 1);
    }
    __device__ __forceinline__ void announce(const PipelineState<Stages>& state, u32 bytes) {
        mbarrier_arrive_expect(full[state.stage], bytes);
    }

    // Consumer: waits for the stage's data.
    __device__ __forceinline__ void wait_full(const PipelineState<Stages>& state) {
        mbarrier_wait(full[state.stage], state.phase);
    }

    // Consumer: releases the stage after its reads. The whole warp calls it, with `elected` true in one lane.
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
