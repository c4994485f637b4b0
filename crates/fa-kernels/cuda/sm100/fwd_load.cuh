// The load warp of the SM100 forward: one thread issues all TMA loads.
#pragma once
#include "attn/ragged.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "sm100/fwd_layout.cuh"
#include "sm100/fwd_tiles.cuh"
#include "tile/pipeline.cuh"

namespace fa::sm100 {

// Loads rows from `row` on of a head as a tile of panels. With lengths on the device the sequence's `len`
// rows are found by `strides` and their offset.
template <class Tile, bool Varied>
__device__ __forceinline__ void load_tile(u8* dst, const TensorMap& map, Mbarrier& full, int row, int head,
                                          int batch, const TmaStrides& strides, int first, int len,
                                          L2Policy policy) {
#pragma unroll
    for (int i = 0; i < Tile::kPanels; ++i) {
        u8* const panel = dst + i * Tile::kPanelBytes;
        if constexpr (Varied) {
            const RaggedRows rows(strides, batch, head, first, len);
            load_ragged(panel, map, full, i * Tile::kPanel, rows, row, policy);
        } else {
            tma_load_4d(panel, map, full, i * Tile::kPanel, row, head, batch, policy);
        }
    }
}

template <Sm100FwdConfig C>
__device__ __forceinline__ void load(SharedStorage<C>& smem, const FwdParams& params, const TensorMap& map_q,
                                     const TensorMap& map_k, const TensorMap& map_v) {
    using T = Traits<C>;
    PipelineState<C.kv_stages> slot;
    Turn q_empty[T::kTiles];
    for_each_tile<C>(params, [&](int index) {
        const QueryTiles<C> work(params, index);
        const WorkTile& tile = work.tile;
        const auto& seqlen = work.seqlen;
        const int kv_head = tile.head / params.shape.group_size;
        auto load_keys = [&](auto kind, const TensorMap& map, const TmaStrides& strides, int block) {
            using Keys = decltype(kind);
            smem.kv_bars.acquire(slot, Keys::kBytes);
            load_tile<Keys, C.varied>(smem.kv[slot.stage], map, smem.kv_bars.full[slot.stage],
                                      block * C.tile_n, kv_head, tile.batch, strides, seqlen.k_offset(),
                                      seqlen.k(), L2Policy::EvictLast);
            slot.advance();
        };
#pragma unroll 1
        for (int block = work.end - 1; block >= work.begin; --block) {
            load_keys(typename T::K{}, map_k, params.varlen.tma_k, block);
            // A slot for K becomes free before the previous work tile's last S has read Q.
            if (block == work.end - 1) {
#pragma unroll
                for (int t = 0; t < T::kTiles; ++t) {
                    if (work.own[t].empty()) continue;
                    q_empty[t].wait_free(smem.q_empty[t]);
                    mbarrier_arrive_expect(smem.q_full[t], T::Q::kBytes);
                    load_tile<typename T::Q, C.varied>(smem.q[t], map_q, smem.q_full[t], work.first_row(t),
                                                       tile.head, tile.batch, params.varlen.tma_q,
                                                       seqlen.q_offset(), seqlen.q(), L2Policy::EvictFirst);
                }
            }
            load_keys(typename T::V{}, map_v, params.varlen.tma_v, block);
        }
    });
}

}  // namespace fa::sm100
