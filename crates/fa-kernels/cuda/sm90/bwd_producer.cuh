// The producer of the SM90 backward: one thread issues all TMA loads.
#pragma once
#include "attn/block_list.cuh"
#include "attn/bwd_tile.cuh"
#include "attn/query_range.cuh"
#include "attn/ragged.cuh"
#include "attn/seqlen.cuh"
#include "bwd_params.cuh"
#include "config.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "sm90/bwd_layout.cuh"
#include "tile/pipeline.cuh"

namespace fa::sm90 {

// The producer's positions in the rings, kept from tile to tile. In persistent kernels, whose producer has
// fewer registers to spare, rings of equal length share one. (In the others ptxas spills for it.)
template <Sm90BwdConfig C>
struct BwdLoads {
    struct NoState {};
    static constexpr bool kOneState = C.persistent && C.q_stages == C.do_stages;
    PipelineState<C.q_stages> q_state;
    [[no_unique_address]] Either<kOneState, NoState, PipelineState<C.do_stages>> own_do_state;
    u32 keys_phase = 0;

    __device__ __forceinline__ auto& do_state() {
        if constexpr (kOneState) {
            return q_state;
        } else {
            return own_do_state;
        }
    }
};

template <Sm90BwdConfig C>
__device__ __forceinline__ void bwd_producer(BwdStorage<C>& smem, const BwdParams& params,
                                             const Seqlen<C.varied>& seqlen, const BwdWork<C>& work,
                                             BwdLoads<C>& loads, const TensorMap& map_q,
                                             const TensorMap& map_k, const TensorMap& map_v,
                                             const TensorMap& map_do) {
    using T = BwdTraits<C>;
    const auto& tile = work.tile;
    const BlockRange& range = work.range;
    const Blocks blocks = query_list<mask_tile_words<C>()>(params, tile.batch, tile.kv_head, tile.n_block);
    auto& q_state = loads.q_state;
    auto& do_state = loads.do_state();
    // Loads rows from `row` on of a head. With lengths on the device the sequence has `len` rows and starts
    // at row `offset`.
    auto load = [&](auto tile_type, u8* dst, const TensorMap& map, Mbarrier& full, const TmaStrides& strides,
                    int offset, int len, int row, int head, L2Policy policy) {
        using Part = decltype(tile_type);
        const RaggedRows rows(strides, tile.batch, head, offset, len);
#pragma unroll
        for (int i = 0; i < Part::kPanels; ++i) {
            u8* to = dst + i * Part::kPanelBytes;
            if constexpr (C.varied) {
                load_ragged(to, map, full, i * Part::kPanel, rows, row, policy);
            } else {
                tma_load_4d(to, map, full, i * Part::kPanel, row, head, tile.batch, policy);
            }
        }
    };
    auto load_keys = [&](auto tile_type, u8* dst, const TensorMap& map, Mbarrier& full,
                         const TmaStrides& strides) {
        load(tile_type, dst, map, full, strides, seqlen.k_offset(), seqlen.k(), tile.n_block * C.tile_n,
             tile.kv_head, L2Policy::EvictFirst);
    };
    auto load_queries = [&](auto tile_type, u8* dst, const TensorMap& map, Mbarrier& full,
                            const TmaStrides& strides, int row, int head) {
        load(tile_type, dst, map, full, strides, seqlen.q_offset(), seqlen.q(), row, head,
             L2Policy::EvictLast);
    };
    auto load_k = [&] {
        mbarrier_arrive_expect(smem.k_full, T::K::kBytes);
        load_keys(typename T::K{}, smem.k, map_k, smem.k_full, params.varlen.tma_k);
    };
    auto load_v = [&] {
        mbarrier_arrive_expect(smem.v_full, T::V::kBytes);
        load_keys(typename T::V{}, smem.v, map_v, smem.v_full, params.varlen.tma_v);
    };
    bool first = true;
#pragma unroll 1
    for (int head = tile.first_head; head < tile.end_head; ++head) {
        const i64 stats = dq_tile(params, tile, head, 0) * C.tile_m;
#pragma unroll 1
        for (int step = range.begin; step < range.end; ++step) {
            const int row = blocks.at(query_block<C>(range, work.walk, step)) * C.tile_m;
            if (!C.persistent && first) load_k();
            smem.q_bars.acquire(q_state, T::Q::kBytes);
            load_queries(typename T::Q{}, smem.q[q_state.stage], map_q, smem.q_bars.full[q_state.stage],
                         params.varlen.tma_q, row, head);
            if constexpr (!BwdLoads<C>::kOneState) q_state.advance();
            if (!C.persistent && first) load_v();
            smem.do_bars.acquire(do_state, T::Do::kBytes + 2 * T::kStatBytes);
            load_queries(typename T::Do{}, smem.dout[do_state.stage], map_do,
                         smem.do_bars.full[do_state.stage], params.varlen.tma_do, row, head);
            bulk_load(smem.lse[do_state.stage], params.lse_log2 + stats + row, T::kStatBytes,
                      smem.do_bars.full[do_state.stage]);
            bulk_load(smem.dpsum[do_state.stage], params.dpsum + stats + row, T::kStatBytes,
                      smem.do_bars.full[do_state.stage]);
            do_state.advance();
            if constexpr (C.persistent) {
                // K's and V's buffers become free when the previous work tile is done, later than Q's.
                if (first) {
                    mbarrier_wait(smem.draws.k_empty, loads.keys_phase ^ 1);
                    load_k();
                    mbarrier_wait(smem.draws.v_empty, loads.keys_phase ^ 1);
                    load_v();
                    loads.keys_phase ^= 1;
                }
            }
            first = false;
        }
    }
}

}  // namespace fa::sm90
