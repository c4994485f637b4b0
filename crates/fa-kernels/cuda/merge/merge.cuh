// The merge kernel: combines partial results for the same queries over different keys, from each part's O and
// LSE alone. One warp per row.
#pragma once
#include "attn/store_rows.cuh"
#include "config.cuh"
#include "merge/merge_params.cuh"
#include "params.cuh"
#include "ptx/math.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

namespace fa {

// The numbers of element types in MergeParams; any other is bf16.
constexpr int kMergeF32 = 0, kMergeF16 = 1;

__device__ __forceinline__ i64 merge_offset(const RowStrides& strides, int batch, int position, int head) {
    return batch * strides.batch + position * strides.seq + head * strides.head;
}

template <Dtype T>
__device__ __forceinline__ void unpack_eight(const Vec16& vec, float (&to)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[2 * i] = unpack_low<T>(vec.words[i]);
        to[2 * i + 1] = unpack_high<T>(vec.words[i]);
    }
}

// Reads 8 consecutive elements of type `type` from element `at` of `data`.
__device__ __forceinline__ void read_eight(const void* data, i64 at, int type, float (&to)[8]) {
    if (type == kMergeF32) {
        const float* from = static_cast<const float*>(data) + at;
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + i);
            to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
        }
        return;
    }
    const Vec16 vec = *reinterpret_cast<const Vec16*>(static_cast<const u16*>(data) + at);
    if (type == kMergeF16) {
        unpack_eight<Dtype::F16>(vec, to);
    } else {
        unpack_eight<Dtype::Bf16>(vec, to);
    }
}

__device__ __forceinline__ void write_eight(void* data, i64 at, int type, const float (&from)[8]) {
    if (type == kMergeF32) {
        float* to = static_cast<float*>(data) + at;
#pragma unroll
        for (int i = 0; i < 8; i += 4)
            *reinterpret_cast<float4*>(to + i) = {from[i], from[i + 1], from[i + 2], from[i + 3]};
        return;
    }
    Vec16 vec;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float low = from[2 * i], high = from[2 * i + 1];
        vec.words[i] = type == kMergeF16 ? pack<Dtype::F16>(low, high) : pack<Dtype::Bf16>(low, high);
    }
    *reinterpret_cast<Vec16*>(static_cast<u16*>(data) + at) = vec;
}

// The kernel's body. Lane p computes the factor of part p: exp(LSE_p) divided by its sum over all parts (and
// the sink). A part whose LSE is -inf, or +inf as FlashAttention-2 writes it for a row without keys, is not
// read; if all are such, O is 0 and LSE is -inf, or the sink. Parts without LSEs are added up.
__device__ __forceinline__ void merge(const MergeParams& params) {
    const int lane = lane_index(), warp = warp_index(), warps = cta_threads() / 32;
    const i64 rows = i64(params.batch) * params.seqlen * params.heads;
    const i64 step = i64(cta_count()) * warps;
    const bool adds = params.parts.items[0].lse == nullptr;
#pragma unroll 1
    for (i64 index = i64(cta_index()) * warps + warp; index < rows; index += step) {
        const int head = int(index % params.heads);
        const i64 rest = index / params.heads;
        const int position = int(rest % params.seqlen), batch = int(rest / params.seqlen);
        const i64 at_lse = (i64(batch) * params.heads + head) * params.seqlen + position;

        float lse = minus_infinity();
        if (lane < params.count) lse = adds ? 0.f : params.parts.items[lane].lse[at_lse];
        if (lse == -minus_infinity()) lse = minus_infinity();
        const float sink = params.sinks == nullptr ? minus_infinity() : params.sinks[head];
        float top = fmaxf(lse, sink);
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) top = fmaxf(top, shuffle_xor(top, mask));
        const float base = top == minus_infinity() ? 0.f : top;
        float weight = exp2_approx((lse - base) * kLog2e), sum = weight;
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
        sum += exp2_approx((sink - base) * kLog2e);
        if (!adds) weight = sum == 0.f ? 0.f : weight / sum;

#pragma unroll 1
        for (int first = 0; first < params.dim; first += 32 * 8) {
            const int column = first + 8 * lane;
            const bool inside = column < params.dim;
            float out[8] = {};
#pragma unroll 1
            for (int p = 0; p < params.count; ++p) {
                const float own = shuffle_from(weight, p);
                if (!inside || own == 0.f) continue;
                const MergePart& part = params.parts.items[p];
                float values[8];
                const i64 at = merge_offset(part.out.strides, batch, position, head) + column;
                read_eight(part.out.data, at, params.part_type, values);
#pragma unroll
                for (int i = 0; i < 8; ++i) out[i] += own * values[i];
            }
            if (inside)
                write_eight(params.out.data, merge_offset(params.out.strides, batch, position, head) + column,
                            params.out_type, out);
        }
        if (params.lse != nullptr && lane == 0)
            params.lse[at_lse] = sum == 0.f ? minus_infinity() : base + logf(sum);
    }
}

}  // namespace fa
