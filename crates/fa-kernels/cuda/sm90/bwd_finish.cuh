// The last steps of the SM90 backward: dQ, and dK and dV where several blocks add to them, from their f32 accumulators.
#pragma once
#include "attn/bwd_finish.cuh"
#include "config.cuh"
#include "params.cuh"
#include "sm90/bwd_layout.cuh"

namespace fa {

// One block per tile of queries, query head and sequence.
template <Sm90BwdConfig C>
__device__ __forceinline__ void sm90_bwd_finish(const BwdParams& params) {
    finish_dq<C, typename sm90::BwdLayout<C>::DqOrder>(params);
}

// One block per tile of keys, K/V head and sequence.
template <Sm90BwdConfig C>
__device__ __forceinline__ void sm90_bwd_finish_kv(const BwdParams& params) {
    finish_dkv<C, typename sm90::BwdLayout<C>::DkOrder, typename sm90::BwdLayout<C>::DvOrder>(params);
}

}  // namespace fa
