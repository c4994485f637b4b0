// The correction warpgroup of the SM100 forward: rescales the rows of O when the softmax has taken a new
// maximum, and stores O at the end. This keeps that work off the path from S to P.
#pragma once
#include "attn/epilogue.cuh"
#include "attn/store_rows.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "sm100/fwd_layout.cuh"
#include "sm100/fwd_tiles.cuh"

namespace fa::sm100 {

constexpr int kPiece = 32;  // columns of O that a thread holds at a time

// Multiplies `columns` columns of the thread's row of O, from `at` on, by `scale`.
__device__ __forceinline__ void rescale_row(u32 at, int columns, float scale) {
#pragma unroll 1
    for (int column = 0; column < columns; column += kPiece) {
        u32 o[kPiece];
        tcgen05::load(o, at + column);
        tcgen05::wait_load();
        tcgen05::pin(o);
#pragma unroll
        for (int i = 0; i < kPiece; ++i) o[i] = bits_of_float(float_of_bits(o[i]) * scale);
        tcgen05::store(at + column, o);
    }
    tcgen05::wait_store();
}

// Stores the thread's row of O, times `factor`, rounded to 16 bits.
template <Dtype T>
__device__ __forceinline__ void store_row(const FwdParams& params, const OutputRow<false>& target, u32 at,
                                          int columns, float factor) {
#pragma unroll 1
    for (int column = 0; column < columns; column += kPiece) {
        u32 o[kPiece];
        tcgen05::load(o, at + column);
        tcgen05::wait_load();
        tcgen05::pin(o);
#pragma unroll
        for (int i = 0; i < kPiece; i += 8) {
            Vec16 vec;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                vec.words[j] =
                    pack<T>(float_of_bits(o[i + 2 * j]) * factor, float_of_bits(o[i + 2 * j + 1]) * factor);
            }
            if (target.inside && column + i < params.shape.head_dim_v)
                *reinterpret_cast<Vec16*>(target.out + column + i) = vec;
        }
    }
}

template <Sm100FwdConfig C>
__device__ __forceinline__ void correct(SharedStorage<C>& smem, const FwdParams& params, u32 base) {
    using T = Traits<C>;
    const bool elected = elect_one();
    const int warp = warp_index() % 4, own_row = 32 * warp + lane_index();
    const u32 lanes = base + (static_cast<u32>(32 * warp) << 16);
    Turn scale_full[T::kTiles];
    u32 outputs[T::kTiles];  // number of P V products of each tile so far
#pragma unroll
    for (int t = 0; t < T::kTiles; ++t) outputs[t] = 0;

    auto receive = [&](int t) {
        scale_full[t].wait(smem.scale_full[t]);
        const float scale = smem.scale[t][own_row];
        warp_sync();
        if (elected) mbarrier_arrive(smem.scale_empty[t]);
        return scale;
    };

    for_each_tile<C>(params, [&](int index) {
        const QueryTiles<C> work(params, index);
#pragma unroll 1
        for (int block = work.end - 1; block >= work.begin; --block) {
#pragma unroll
            for (int t = 0; t < T::kTiles; ++t) {
                if (!work.visits(t, block)) continue;
                if (!work.is_first(t, block)) {
                    const float scale = receive(t);
                    // The scale was sent after an S that was issued after P V, so P V is done.
                    tcgen05::fence_after();
                    if (warp_any(scale != 1.f)) rescale_row(lanes + T::o(t), C.head_dim_v, scale);
                }
                // First tile of keys: the previous work tile's O has been read.
                tcgen05::fence_before();
                warp_sync();
                if (elected) mbarrier_arrive(smem.p_full[t]);
                ++outputs[t];
            }
        }
#pragma unroll
        for (int t = 0; t < T::kTiles; ++t) {
            if (work.own[t].empty()) continue;
            const float factor = receive(t);
            mbarrier_wait(smem.o_full[t], (outputs[t] - 1) & 1);
            tcgen05::fence_after();
            const OutputRow<false> target(params, work.seqlen, work.first_row(t) + own_row, work.seqlen.q(),
                                          work.tile.head, work.tile.batch);
            store_row<C.dtype>(params, target, lanes + T::o(t), C.head_dim_v, factor);
        }
    });
}

}  // namespace fa::sm100
