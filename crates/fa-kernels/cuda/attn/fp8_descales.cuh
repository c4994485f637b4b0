// What e4m3 tensors are multiplied by: factors of scores (Q's and K's), and of O (V's).
#pragma once
#include "attn/programs.cuh"
#include "fp8_params.cuh"
#include "fwd_params.cuh"
#include "types.cuh"

namespace fa {

// The parameters of a launch, with the descales behind them.
struct WithFp8 : WithPrograms<FwdParams> {
    Fp8Params fp8;
};

// The descale of a sequence and K/V head; 1 where there is none.
__device__ __forceinline__ float descale_of(const HeadDescale& descale, int batch, int kv_head) {
    return descale.data == nullptr ? 1.f : descale.data[batch * descale.stride + kv_head];
}

// The factor from products to exponents of 2 in a work tile. Not 0, by which a hidden key's score, -inf, would
// become NaN: scores below the smallest factor are as good as equal.
__device__ __forceinline__ float descaled_log2(const FwdParams& params, const Fp8Params& fp8, int batch,
                                               int kv_head) {
    constexpr float kLeast = 1.17549435e-38f;
    const float factor = params.score.scale_log2 * descale_of(fp8.q, batch, kv_head) *
                         descale_of(fp8.k, batch, kv_head);
    return factor < kLeast ? kLeast : factor;
}

// Multiplies the factors that normalise two rows of O by V's descale. Rows without keys stay 0.
__device__ __forceinline__ void descale_rows(const Fp8Params& fp8, int batch, int kv_head,
                                             float (&factor)[2]) {
    const float descale = descale_of(fp8.v, batch, kv_head);
#pragma unroll
    for (float& own : factor) own = own == 0.f ? 0.f : own * descale;
}

}  // namespace fa
