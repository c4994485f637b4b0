// What the codes of an 8-bit cache are multiplied by. Descales of a head, or of a sequence and head, are
// factors of scores and of O; those of each row (attn/code_rows.cuh) are applied where codes are converted.
#pragma once
#include "attn/programs.cuh"
#include "cache_params.cuh"
#include "fwd_params.cuh"
#include "ptx/math.cuh"
#include "types.cuh"

namespace fa {

// The parameters of kernels that read codes.
struct WithCache : WithPrograms<FwdParams> {
    CacheParams cache;
};
static_assert(sizeof(WithCache) == sizeof(WithPrograms<FwdParams>) + sizeof(CacheParams));

// The parameters of the cache. Only kernels that read codes call it: theirs lie behind the others.
__device__ __forceinline__ const CacheParams& cache_of(const FwdParams& params) {
    return static_cast<const WithCache&>(params).cache;
}

// The descale of a sequence and head; 1 where there is none, or one of each row.
__device__ __forceinline__ float head_descale(const CodeDescales& descales, int batch, int kv_head) {
    return descales.of_head == nullptr ? 1.f
                                       : descales.of_head[i64(batch) * descales.sequence_stride + kv_head];
}

// Whether the codes of latents, whose keys have columns of both tensors, are multiplied where they are
// converted: unless one descale is that of all.
__device__ __forceinline__ bool scales_latents(const FwdParams& params, int batch, int kv_head) {
    const CacheParams& cache = cache_of(params);
    if (cache.v.of_rows != nullptr) return true;
    if (params.shape.head_dim == params.shape.head_dim_v) return false;
    return cache.k.of_rows != nullptr ||
           head_descale(cache.k, batch, kv_head) != head_descale(cache.v, batch, kv_head);
}

// The factors of a work tile's scores: those of the launch, or with Codes times K's descale.
template <bool Codes>
struct TileScores {
    const ScoreParams& params;

    __device__ __forceinline__ explicit TileScores(const FwdParams& params) : params(params.score) {}
    __device__ __forceinline__ void of_tile(const FwdParams&, int, int) {}
};

template <>
struct TileScores<true> {
    // The smallest factor of exponents: with 0 a hidden key's score, -inf, would become NaN.
    static constexpr float kLeast = 1.17549435e-38f;

    ScoreParams params;

    __device__ __forceinline__ explicit TileScores(const FwdParams& params) : params(params.score) {}
    __device__ __forceinline__ void of_tile(const FwdParams& launch, int batch, int kv_head) {
        multiply(launch, head_descale(cache_of(launch).k, batch, kv_head));
    }
    // Those of the launch times `descale`.
    __device__ __forceinline__ void multiply(const FwdParams& launch, float descale) {
        params.scale = at_least(launch.score.scale * descale);
        params.scale_log2 = at_least(launch.score.scale_log2 * descale);
        params.softcap_exponent = launch.score.softcap_exponent * descale;
    }

    // NaN stays NaN, and a negative factor becomes it: the largest product would not be the largest score.
    __device__ __forceinline__ static float at_least(float factor) {
        const float least = factor < 0.f ? float_of_bits(0x7fc00000) : kLeast;
        return factor < kLeast ? least : factor;
    }
};

// Multiplies the factors that normalise two rows of O by V's descale. Rows without keys stay 0.
__device__ __forceinline__ void descale_rows(const FwdParams& params, int batch, int kv_head,
                                             float (&factor)[2]) {
    const float descale = head_descale(cache_of(params).v, batch, kv_head);
#pragma unroll
    for (float& own : factor) own = own == 0.f ? 0.f : own * descale;
}

}  // namespace fa
