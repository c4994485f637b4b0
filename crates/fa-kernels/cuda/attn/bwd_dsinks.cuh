// The backward's dsinks kernel: dsink = -sum over the head's rows of exp(sink - LSE) * dPsum.
#pragma once
#include "attn/bwd_tile.cuh"
#include "attn/exponent.cuh"
#include "attn/scheduler.cuh"
#include "attn/seqlen.cuh"
#include "bwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

namespace fa {

// One CTA per query head, launched after the preprocess, reads the rows' statistics from the workspace.
// Threads add their rows, and the CTA adds the threads' sums, in a fixed order: equal inputs give equal bits.
// Rows past the end have an LSE of +inf and add nothing. C is the config of a backward kernel.
template <auto C>
__device__ __forceinline__ void bwd_dsinks(const BwdParams& params) {
    struct Sums {
        float of_warp[32];
    };
    if (params.mods.dsinks == nullptr) return;
    const int head = cta_index(), rows = params.m_blocks * C.tile_m, heads = params.shape.heads_q;
    // As the statistics have an LSE: that of a row which is the sink's alone gives it a probability of 1.
    const float sink = params.mods.sinks[head];
    const float sink_log2 = sink == minus_infinity() ? sink : lse_exponent(sink);
    float sum = 0.f;
    auto add = [&](i64 at) {
        sum = fmaf(exp2_approx(sink_log2 - params.lse_log2[at]), params.dpsum[at], sum);
    };
    if constexpr (C.varied) {
        const WorkPlan plan{params.plan};
        const int items = plan.count(PlanCount::MTiles);
        for (i64 row = thread_index(); row < i64(items) * C.tile_m; row += cta_threads()) {
            const PlanItem item = plan.m_tiles()[row / C.tile_m];
            const auto seqlen = Seqlen<true>::of(params, item.sequence);
            const auto place = WorkspacePlace::of_queries<C.tile_m>(params, seqlen, item.sequence);
            const i64 tile = (i64(place.entry) * heads + head) * params.m_blocks + place.first + item.block;
            add(tile * C.tile_m + row % C.tile_m);
        }
    } else {
        for (int batch = 0, row = thread_index();; row += cta_threads()) {
            while (row >= rows && batch < params.shape.batch) {
                row -= rows;
                ++batch;
            }
            if (batch >= params.shape.batch) break;
            add((i64(batch) * heads + head) * rows + row);
        }
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) sum += shuffle_xor(sum, distance);
    auto& smem = shared_memory<Sums>();
    const int own_warp = warp_index();  // a shuffle, so all lanes call it
    if (lane_index() == 0) smem.of_warp[own_warp] = sum;
    cta_sync();
    if (thread_index() != 0) return;
    float total = 0.f;
    const int warps = cta_threads() / 32;
    for (int warp = 0; warp < warps; ++warp) total += smem.of_warp[warp];
    params.mods.dsinks[head] = -total;
}

}  // namespace fa
