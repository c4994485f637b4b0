// The backward's epilogue for tiles of keys that no query sees.
#pragma once
#include "attn/bwd_tile.cuh"
#include "attn/seqlen.cuh"
#include "attn/store_rows.cuh"
#include "attn/tensor_view.cuh"
#include "bwd_params.cuh"
#include "types.cuh"

namespace fa {

// Writes zeros to dK and dV of the tile's `tile_n` keys, as thread `thread` of `threads`. With split heads
// the preprocess has zeroed their f32 accumulators instead.
template <bool Varied>
__device__ __forceinline__ void store_zero_gradients(const BwdParams& params, const Seqlen<Varied>& seqlen,
                                                     const BwdTile& tile, int tile_n, int thread,
                                                     int threads) {
    if (params.head_splits > 1) return;
    const int first = tile.n_block * tile_n, left = min(tile_n, seqlen.k() - first);
    auto clear = [&](const MutTensor& tensor, int columns) {
        u16* rows = view(tensor).row(tile.batch, seqlen.k_offset() + first, tile.kv_head);
        const int chunks = columns / 8;
#pragma unroll 1
        for (int chunk = thread; chunk < left * chunks; chunk += threads) {
            *reinterpret_cast<Vec16*>(rows + chunk / chunks * tensor.strides.seq + chunk % chunks * 8) =
                Vec16{};
        }
    };
    clear(params.dk, params.shape.head_dim);
    clear(params.dv, params.shape.head_dim_v);
}

}  // namespace fa
