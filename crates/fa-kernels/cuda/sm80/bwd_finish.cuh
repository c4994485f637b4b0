// The last steps of the SM80-class backward: dQ, and dK and dV where several blocks add to them, from their f32 accumulators.
#pragma once
#include "attn/bwd_finish.cuh"
#include "config.cuh"
#include "params.cuh"
#include "sm80/bwd_layout.cuh"

namespace fa {

// One block per tile of queries, query head and sequence.
template <Sm80BwdConfig C>
__device__ __forceinline__ void sm80_bwd_finish(const BwdParams& params) {
    finish_dq<C, typename sm80::BwdLayout<C>::DqOrder>(params);
}

// One block per tile of keys, K/V head and sequence.
template <Sm80BwdConfig C>
__device__ __forceinline__ void sm80_bwd_finish_kv(const BwdParams& params) {
    finish_dkv<C, typename sm80::BwdLayout<C>::CutDk, typename sm80::BwdLayout<C>::CutDv>(params);
}

}  // namespace fa
