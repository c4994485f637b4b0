// The softmax warpgroups of the SM100 forward: one per tile of queries, one thread per row.
#pragma once
#include "attn/alibi.cuh"
#include "attn/epilogue.cuh"
#include "attn/exponent.cuh"
#include "attn/score_mod.cuh"
#include "attn/tensor_view.cuh"
#include "attn/visibility.cuh"
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

// The online softmax of one row, which one thread holds whole; attn/softmax.cuh is its counterpart for
// fragments.
template <int ExpPolyOf16, int RescaleThreshold>
struct RowSoftmax {
    static constexpr float kNothing = -kLargest;  // no exponent is below
    static constexpr float kSinkAbove = 64.f;     // a sink may be that far above the maximum

    float max = kNothing;
    float sum = 0.f;

    // A sink is a logit, in natural units, that joins the sum but not the output: begin() comes before the
    // first tile of keys, add_sink() after it.
    __device__ __forceinline__ void begin(float sink) {
        max = fmaxf(kNothing, sink_exponent(sink) - kSinkAbove);
    }
    __device__ __forceinline__ void add_sink(float sink) { sum += exp2_approx(sink_exponent(sink) - max); }

    // Updates the maximum by a tile of scores; returns the factor for earlier results.
    template <int N>
    __device__ __forceinline__ float take_max(const float (&s)[N], float scale, bool is_first) {
        // Four independent chains, to hide latency.
        float chain[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
        for (int i = 4; i < N; ++i) chain[i % 4] = fmaxf(chain[i % 4], s[i]);
        const float tile_max = fmaxf(fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3]));
        float grown = fmaxf(tile_max * scale, max);
        if (RescaleThreshold > 0 && !is_first && grown - max <= float(RescaleThreshold)) grown = max;
        const float rescale = is_first ? 1.f : exp2_approx(max - grown);
        max = grown;
        sum *= rescale;
        return rescale;
    }

    // Computes P, packed, of the 2 * Words scores from `first` on, and adds it to the sum.
    template <Dtype T, int Words, int N>
    __device__ __forceinline__ void exponentiate(const float (&s)[N], int first, float scale,
                                                 u32 (&p)[Words]) {
        float part[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < Words; ++i) {
            float own[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = first + 2 * i + half;
                // Spread evenly, so that both units always have work.
                const bool polynomial = at * ExpPolyOf16 % 16 + ExpPolyOf16 > 15;
                const float x = fmaf(s[at], scale, -max);
                own[half] = polynomial ? exp2_polynomial(x) : exp2_approx(x);
                part[half] += own[half];
            }
            p[i] = pack<T>(own[0], own[1]);
        }
        sum += part[0] + part[1];
    }

    // The factor that normalises O, and the LSE (natural logarithm): 0 and -inf for a row that saw no key.
    __device__ __forceinline__ float factor() const { return is_empty() ? 0.f : 1.f / sum; }
    __device__ __forceinline__ float lse() const {
        return is_empty() ? minus_infinity() : (max + log2f(sum)) * kLn2;
    }
    // The LSE with the sink, which is that of a row that saw no key.
    __device__ __forceinline__ float lse(float sink) const {
        return is_empty() ? sink : lse_with_sink(sink, max, sum);
    }
    // Masked keys add at most 2^-126 each (by the polynomial); a visible one adds at least
    // 2^-RescaleThreshold.
    __device__ __forceinline__ bool is_empty() const { return sum < 1e-30f; }
};

// Turns the products of the row of query `query` with the keys from `first_key` on into masked scores; with
// ALiBi, into exponents.
template <Sm100FwdConfig C>
__device__ __forceinline__ void modify(float (&s)[C.tile_n], const FwdParams& params,
                                       const Seqlen<C.varied>& seqlen, float slope, int query, int first_key,
                                       bool needs_mask) {
    const ScoreMod<C.softcap> score_mod{params.score};
    score_mod.apply(s);
    if constexpr (C.alibi) {
        const float distance = float(query + seqlen.k() - seqlen.q() - first_key);
#pragma unroll
        for (int i = 0; i < C.tile_n; ++i)
            s[i] = fmaf(s[i], score_mod.to_log2(), alibi_bias<C.mask, -1>(slope, distance, i));
    }
    if (!needs_mask) return;
    const Visibility<C.mask, C.varied> visible{params.shape, seqlen};
    const int begin = visible.keys_begin(query) - first_key, end = visible.keys_end(query) - first_key;
#pragma unroll
    for (int i = 0; i < C.tile_n; ++i) {
        const bool hidden = i >= end || (C.mask == MaskKind::Window && i < begin);
        s[i] = hidden ? minus_infinity() : s[i];
    }
}

// Stores a thread's row where no query of its tile sees a key: O = 0, and LSE = -inf or the sink.
template <Sm100FwdConfig C>
__device__ __forceinline__ void store_empty_row(const FwdParams& params, const OutputRow<false>& target,
                                                int head) {
    if (!target.inside) return;
    for (int column = 0; column < params.shape.head_dim_v; column += 8)
        *reinterpret_cast<Vec16*>(target.out + column) = Vec16{};
    if (params.lse != nullptr) params.lse[target.lse] = C.sinks ? params.mods.sinks[head] : minus_infinity();
}

// The loop of softmax warpgroup `t`, for the rows of tile `t`.
template <Sm100FwdConfig C>
__device__ __forceinline__ void softmax(SharedStorage<C>& smem, const FwdParams& params, u32 base, int t) {
    using T = Traits<C>;
    const bool elected = elect_one();
    const int warp = warp_index() % 4, own_row = 32 * warp + lane_index();
    const u32 lanes = base + (static_cast<u32>(32 * warp) << 16);
    const u32 at_s = lanes + T::s(t), at_p = lanes + T::p(t);
    const float scale_log2 = C.alibi ? 1.f : ScoreMod<C.softcap>{params.score}.to_log2();
    Turn s_full, scale_empty;

    // Sends the row's factor for O to the correction warpgroup.
    auto send = [&](float scale) {
        scale_empty.wait_free(smem.scale_empty[t]);
        smem.scale[t][own_row] = scale;
        warp_sync();
        if (elected) mbarrier_arrive(smem.scale_full[t]);
    };

    for_each_tile<C>(params, [&](int index) {
        const QueryTiles<C> work(params, index);
        const BlockRange range = T::kTiles > 1 && t > 0 ? work.own[T::kTiles - 1] : work.own[0];
        const int head = work.tile.head, batch = work.tile.batch, query = work.first_row(t) + own_row;
        const OutputRow<false> target(params, work.seqlen, query, work.seqlen.q(), head, batch);
        if (range.empty()) {
            store_empty_row<C>(params, target, head);
            return;
        }
        RowSoftmax<C.exp_poly_of_16, C.rescale_threshold> row;
        float sink = 0.f, slope = 0.f;
        if constexpr (C.sinks) {
            sink = params.mods.sinks[head];
            row.begin(sink);
        }
        if constexpr (C.alibi) slope = alibi_slope<C.mask>(params.mods, batch, head, kLog2e);
#pragma unroll 1
        for (int block = range.end - 1; block >= range.begin; --block) {
            const bool is_first = block == range.end - 1;
            s_full.wait(smem.s_full[t]);
            tcgen05::fence_after();
            float s[C.tile_n];
            u32 loaded[C.tile_n / 32][32];
#pragma unroll
            for (int i = 0; i < C.tile_n / 32; ++i) tcgen05::load(loaded[i], at_s + 32 * i);
            tcgen05::wait_load();
#pragma unroll
            for (int i = 0; i < C.tile_n / 32; ++i) tcgen05::pin(loaded[i]);
#pragma unroll
            for (int i = 0; i < C.tile_n; ++i) s[i] = float_of_bits(loaded[i / 32][i % 32]);
            modify<C>(s, params, work.seqlen, slope, query, block * C.tile_n, range.needs_mask(block));
            const float rescale = row.take_max(s, scale_log2, is_first);
            if (!is_first) send(rescale);
#pragma unroll
            for (int i = 0; i < C.tile_n / 32; ++i) {
                u32 p[16];
                row.template exponentiate<C.dtype>(s, 32 * i, scale_log2, p);
                tcgen05::store(at_p + 16 * i, p);
            }
            tcgen05::wait_store();
            tcgen05::fence_before();
            warp_sync();
            if (elected) mbarrier_arrive(smem.p_full[t]);
            if constexpr (C.sinks) {
                if (is_first) row.add_sink(sink);
            }
        }
        send(row.factor());
        if (params.lse != nullptr && target.inside)
            params.lse[target.lse] = C.sinks ? row.lse(sink) : row.lse();
    });
}

}  // namespace fa::sm100
