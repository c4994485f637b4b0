// The gradient of an array that is added to the scores of several sequences or heads: the sums of dS, which
// the main kernel has stored. A thread sums eight neighbouring keys, always in the same order: no atomics.
#pragma once
#include "attn/array_gradient.cuh"
#include "attn/programs.cuh"
#include "attn/store_rows.cuh"
#include "bwd_params.cuh"
#include "config.cuh"
#include "ptx/math.cuh"
#include "ptx/thread.cuh"
#include "types.cuh"

namespace fa {

constexpr int kSumThreads = 256;

// T: the type of dS, and of the array's elements.
template <Dtype T, ArrayRules R>
__device__ __forceinline__ void array_sum(const BwdParams& params) {
    const ArrayGradientParams& gradients = gradients_of(params);
    const ProgramArray& array = programs_of(params).arrays[R.slot];
    const ShapeParams& shape = params.shape;
    auto extent = [&](int axis) { return axis < 0 ? 1 : array.extents[axis < 0 ? 0 : axis]; };
    const bool by_batch = extent(R.batch) > 1, by_head = extent(R.head) > 1, by_kv = extent(R.kv_head) > 1;
    const int own_heads = by_head ? shape.heads_q : by_kv ? shape.heads_kv : 1;
    // Of a longer array the first are read.
    const int queries = shape.seqlen_q, keys = shape.seqlen_k, chunks = ceil_div(keys, 8);

    i64 index = i64(cta_index()) * kSumThreads + thread_index();
    const int key = static_cast<int>(index % chunks) * 8;
    index /= chunks;
    const int query = static_cast<int>(index % queries);
    index /= queries;
    const int head_index = static_cast<int>(index % own_heads);
    const i64 batch_index = index / own_heads;
    if (batch_index >= (by_batch ? shape.batch : 1)) return;

    const int first_head = by_kv ? head_index * shape.group_size : by_head ? head_index : 0;
    const StoredParams& stored = stored_of(params);
    const i64 of_head = i64(queries) * stored.pitch, of_batch = of_head * shape.heads_q;
    const u16* from = static_cast<const u16*>(stored.room) + batch_index * of_batch + first_head * of_head +
                      i64(query) * stored.pitch + key;
    int outer = by_batch ? 1 : shape.batch, inner = by_head ? 1 : by_kv ? shape.group_size : shape.heads_q;
    i64 outer_step = of_batch, inner_step = of_head;
    // Many loads are under way at once along the longer one.
    if (inner < outer) {
        const int count = inner;
        inner = outer;
        outer = count;
        outer_step = of_head;
        inner_step = of_batch;
    }
    float sums[8] = {};
#pragma unroll 1
    for (int i = 0; i < outer; ++i, from += outer_step) {
        const u16* at = from;
#pragma unroll 8
        for (int j = 0; j < inner; ++j, at += inner_step) {
            const Vec16 all = *reinterpret_cast<const Vec16*>(at);
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                sums[2 * w] += unpack_low<T>(all.words[w]);
                sums[2 * w + 1] += unpack_high<T>(all.words[w]);
            }
        }
    }

    i64 to = 0;
#pragma unroll
    for (int axis = 0; axis < 4; ++axis) {
        int own = -1;
        if (axis == R.batch) own = by_batch ? static_cast<int>(batch_index) : 0;
        if (axis == R.head) own = by_head ? head_index : 0;
        if (axis == R.kv_head) own = by_kv ? head_index : 0;
        if (axis == R.query) own = query;
        if (axis == R.key) own = key;
        if (own >= 0) to = to * array.extents[axis] + own;
    }
    const bool is_narrow = (stored.narrow >> R.slot & 1) != 0;
    if (is_narrow) {
        u16* const out = static_cast<u16*>(gradients.to[R.slot]) + to;
        if (keys % 8 == 0 && extent(R.key) % 8 == 0 &&
            reinterpret_cast<u64>(gradients.to[R.slot]) % 16 == 0) {
            Vec16 all;
#pragma unroll
            for (int w = 0; w < 4; ++w) all.words[w] = pack<T>(sums[2 * w], sums[2 * w + 1]);
            *reinterpret_cast<Vec16*>(out) = all;
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (key + i < keys) out[i] = static_cast<u16>(pack<T>(sums[i], 0.f));
        }
        return;
    }
    float* const out = static_cast<float*>(gradients.to[R.slot]) + to;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (key + i < keys) out[i] = sums[i];
    }
}

}  // namespace fa
