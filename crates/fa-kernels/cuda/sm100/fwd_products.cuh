// The MMA warp of the SM100 forward: one thread issues all products. S of a tile of queries follows its P V,
// so that one tile's products run under the other tile's softmax.
//
// S overwrites the P of the previous step, which P V reads. The tensor core executes products in order, but
// the PTX ISA guarantees this only for products with the same accumulator; so S waits for P V's commit.
#pragma once
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "sm100/fwd_layout.cuh"
#include "sm100/fwd_tiles.cuh"
#include "tile/pipeline.cuh"
#include "tile/tensor_operand.cuh"

namespace fa::sm100 {

template <Sm100FwdConfig C>
struct Products {
    using T = Traits<C>;
    using Q = typename T::Q;
    using K = typename T::K;
    using V = typename T::V;
    static constexpr u32 kInstructionS = tensor_instruction<C.dtype>(C.tile_n, false);
    static constexpr u32 kInstructionO = tensor_instruction<C.dtype>(C.head_dim_v, true);

    SharedStorage<C>& smem;
    u32 base;  // tensor memory's address
    PipelineState<C.kv_stages> slot;
    Turn q_full[T::kTiles], p_full[T::kTiles], o_full[T::kTiles];
    bool pv_runs[T::kTiles];  // P V of the tile has been issued and not waited for

    __device__ __forceinline__ Products(SharedStorage<C>& smem, u32 base) : smem(smem), base(base) {
#pragma unroll
        for (int t = 0; t < T::kTiles; ++t) pv_runs[t] = false;
    }

    // Issues S of tile `t` with the keys in slot `stage`.
    __device__ __forceinline__ void scores(const QueryTiles<C>& work, int t, int block, int stage) {
        if (work.is_first(t, block)) q_full[t].wait(smem.q_full[t]);
        if (pv_runs[t]) o_full[t].wait(smem.o_full[t]);
        pv_runs[t] = false;
        tcgen05::fence_after();
        const Descriptor q = tensor_k_major<Q>(smem_address(smem.q[t])).recomputed();
        const Descriptor k = tensor_k_major<K>(smem_address(smem.kv[stage])).recomputed();
#pragma unroll
        for (int i = 0; i < C.head_dim; i += 16) {
            tcgen05::mma_ss(base + T::s(t), q.at(Q::column_offset(i)), k.at(K::column_offset(i)),
                            kInstructionS, i != 0);
        }
        tcgen05::commit(smem.s_full[t]);
        if (work.is_last(t, block)) tcgen05::commit(smem.q_empty[t]);
    }

    // Issues O += P V of tile `t` with the values in slot `stage`.
    __device__ __forceinline__ void outputs(const QueryTiles<C>& work, int t, int block, int stage) {
        p_full[t].wait(smem.p_full[t]);
        tcgen05::fence_after();
        const Descriptor v = tensor_mn_major<V>(smem_address(smem.kv[stage])).recomputed();
        const bool accumulate = !work.is_first(t, block);
#pragma unroll
        for (int i = 0; i < C.tile_n; i += 16) {
            tcgen05::mma_ts(base + T::o(t), base + T::p(t) + i / 2, v.at(V::row_offset(i)), kInstructionO,
                            i != 0 || accumulate);
        }
        tcgen05::commit(smem.o_full[t]);
        pv_runs[t] = true;
    }

    // Waits for the next slot to be full; returns its number.
    __device__ __forceinline__ int next_slot() {
        smem.kv_bars.wait_full(slot);
        const int stage = slot.stage;
        slot.advance();
        return stage;
    }

    __device__ __forceinline__ void work_tile(const QueryTiles<C>& work) {
        if (work.begin >= work.end) return;
        int keys = next_slot();
#pragma unroll
        for (int t = 0; t < T::kTiles; ++t) {
            if (work.visits(t, work.end - 1)) scores(work, t, work.end - 1, keys);
        }
        tcgen05::commit(smem.kv_bars.empty[keys]);
#pragma unroll 1
        for (int block = work.end - 1; block >= work.begin; --block) {
            const int values = next_slot();
            bool waited = false;
#pragma unroll
            for (int t = 0; t < T::kTiles; ++t) {
                if (work.visits(t, block)) outputs(work, t, block, values);
                if (block == work.begin) continue;
                if (!waited) keys = next_slot();
                waited = true;
                if (work.visits(t, block - 1)) scores(work, t, block - 1, keys);
            }
            tcgen05::commit(smem.kv_bars.empty[values]);
            if (waited) tcgen05::commit(smem.kv_bars.empty[keys]);
        }
    }
};

template <Sm100FwdConfig C>
__device__ __forceinline__ void multiply(SharedStorage<C>& smem, const FwdParams& params, u32 base) {
    Products<C> products(smem, base);
    for_each_tile<C>(params, [&](int index) { products.work_tile(QueryTiles<C>(params, index)); });
}

}  // namespace fa::sm100
