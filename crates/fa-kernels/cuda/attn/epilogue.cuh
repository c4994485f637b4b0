// The forward's epilogue: writes O and LSE from accumulator fragments.
#pragma once
#include "attn/rows.cuh"
#include "attn/seqlen.cuh"
#include "attn/store_rows.cuh"
#include "attn/tensor_view.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/math.cuh"
#include "ptx/thread.cuh"
#include "types.cuh"

namespace fa {

// Where a row of the work tile goes: its row of O, and its index in LSE. The tile's rows end at `end`.
template <bool PackGqa>
struct OutputRow {
    bool inside;
    u16* out;
    i64 lse;

    template <bool Varied>
    __device__ __forceinline__ OutputRow(const FwdParams& params, const Seqlen<Varied>& seqlen, int row,
                                         int end, int head, int batch) {
        const Rows<PackGqa> rows(params.shape);
        const int query = rows.query(row);
        const int query_head = rows.head(row, head);
        inside = row < end;
        out = view(params.out).row(batch, seqlen.q_offset() + query, query_head);
        lse = seqlen.lse_row(batch, query_head, params.shape.heads_q) + query;
    }
};

// Stores the thread's two rows, `row` and `row` + 8, if they are before `end`: O scaled by `factor`, whose
// columns begin at `shift` in the tile, and LSE if `has_lse`.
template <Dtype T, bool PackGqa, bool Varied, int N>
__device__ __forceinline__ void store_output(const FwdParams& params, const Seqlen<Varied>& seqlen,
                                             const float (&o)[N], const float (&factor)[2],
                                             const float (&lse)[2], int row, int end, int head, int batch,
                                             int shift, bool has_lse = true) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const OutputRow<PackGqa> target(params, seqlen, row + 8 * r, end, head, batch);
        store_fragment_row<T>(r, target.out, target.inside, o, factor[r], -shift, params.shape.head_dim_v);
        if (has_lse && params.lse != nullptr && thread_index() % 4 == 0 && target.inside)
            params.lse[target.lse] = lse[r];
    }
}

// Loads the sinks of the heads of rows `row` and `row` + 8, in natural units. A division by the group per row
// costs as much as the load itself; with groups of 1, 2, 4 or 8 heads both rows have the same head.
template <bool PackGqa>
__device__ __forceinline__ void load_sinks(const FwdParams& params, int row, int head, float (&sink)[2]) {
    const Rows<PackGqa> rows(params.shape);
    if (rows.group <= 8 && (rows.group & (rows.group - 1)) == 0) {
        sink[0] = sink[1] = params.mods.sinks[rows.head_alone(row, head)];
        return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sink[r] = params.mods.sinks[rows.head_alone(row + 8 * r, head)];
}

// Finishes the softmax of the thread's two rows, with sinks if the config has them.
template <bool PackGqa, bool Sinks, class RowState>
__device__ __forceinline__ void finish_rows(const FwdParams& params, RowState& softmax, int row, int head,
                                            float (&factor)[2], float (&lse)[2]) {
    if constexpr (Sinks) {
        float sink[2];
        load_sinks<PackGqa>(params, row, head, sink);
        softmax.finish(sink, factor, lse);
    } else {
        softmax.finish(factor, lse);
    }
}

// Stores rows `row` and `row` + 8 where no query of the tile sees a key: O = 0, and LSE = -inf or the sink.
template <bool PackGqa, bool Sinks, bool Varied>
__device__ __forceinline__ void store_nothing_seen(const FwdParams& params, const Seqlen<Varied>& seqlen,
                                                   int row, int end, int head, int batch) {
    const int lane = thread_index() % 4;
    for (int r = 0; r < 2; ++r) {
        const OutputRow<PackGqa> target(params, seqlen, row + 8 * r, end, head, batch);
        if (!target.inside) continue;
        for (int column = 8 * lane; column < params.shape.head_dim_v; column += 32) {
            *reinterpret_cast<Vec16*>(target.out + column) = Vec16{};
        }
        if (params.lse != nullptr && lane == 0) {
            const int of_head = Rows<PackGqa>(params.shape).head(row + 8 * r, head);
            params.lse[target.lse] = Sinks ? params.mods.sinks[of_head] : minus_infinity();
        }
    }
}

}  // namespace fa
