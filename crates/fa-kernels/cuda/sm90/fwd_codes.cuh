// The producer of the SM90 forward for a cache of codes: two warps copy the codes of K, and two those of V,
// by cp.async to stages of their own, and convert them into the tiles that TMA would write.
#pragma once
#include "attn/block_range.cuh"
#include "attn/code_rows.cuh"
#include "attn/descales.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/segment.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "sm90/fwd_layout.cuh"
#include "sm90/fwd_producer.cuh"
#include "sm90/fwd_tiles.cuh"
#include "tile/codes.cuh"
#include "tile/pipeline.cuh"

namespace fa::sm90 {

// The half of each tile that a warp copies and converts: the places of its rows are looked up by one lane
// each, and exchanged by shuffles within the lanes that share rows.
template <Sm90FwdConfig C, bool Values>
struct CodeHalf {
    using T = Traits<C>;
    using Kv = Either<Values, typename T::V, typename T::K>;
    using Codes = typename T::template Codes<Kv>;
    using Rows = CodeRows<C.paged>;
    static constexpr int kHalf = C.tile_n / 2;
    static constexpr int kLanes = Codes::kLanes;
    static constexpr int kLookups = ceil_div(kHalf, 32);
    static_assert(kLanes == 1 || kHalf % Codes::kSweep == 0, "lanes that share rows are in the same sweeps");

    SharedStorage<C>& smem;
    int member;  // the warp's half

    // The table entries of the rows that a lane looks up: one of every 32.
    struct Entries {
        int of[kLookups];
    };

    // The first row that the lane looks up. (Lanes that share rows look up those of successive sweeps.)
    __device__ __forceinline__ static int own_row() {
        return lane_index() / kLanes + Codes::kSweep * (lane_index() % kLanes);
    }
    __device__ __forceinline__ int key_of(int n_block, int lookup) const {
        return n_block * C.tile_n + member * kHalf + own_row() + 32 * lookup;
    }
    __device__ __forceinline__ Entries entries_of(const Rows& rows, int n_block) const {
        Entries entries;
#pragma unroll
        for (int i = 0; i < kLookups; ++i) entries.of[i] = rows.entry_of(key_of(n_block, i));
        return entries;
    }

    __device__ __forceinline__ u8* codes(int stage) const {
        if constexpr (Values) {
            return smem.codes.v[stage][member];
        } else {
            return smem.codes.k[stage][member];
        }
    }
    __device__ __forceinline__ float* descales(int stage) const {
        return smem.codes.descales[stage][Values] + member * kHalf;
    }

    // Starts to copy the half of tile `n_block` to `stage`.
    __device__ __forceinline__ void start(const Rows& rows, int row_bytes, int stage, int n_block,
                                          const Entries& entries) const {
        u32 at[kLookups];
#pragma unroll
        for (int i = 0; i < kLookups; ++i) {
            const int row = own_row() + 32 * i;
            const auto place = rows.place_of(key_of(n_block, i), entries.of[i], !Values && row < kHalf);
            at[i] = place.at;
            if (rows.descales != nullptr && row < kHalf)
                rows.copy_descale(smem_address(descales(stage) + row), place);
        }
        Codes::start(smem_address(codes(stage)), lane_index(), rows.first, row_bytes, [&](int sweep) {
            if constexpr (kLanes == 1) {
                return at[sweep];
            } else {
                return shuffle_within<kLanes>(at[sweep / kLanes], sweep % kLanes);
            }
        });
    }

    // Converts the half in `stage`, which has arrived, to the tile of `to`.
    __device__ __forceinline__ void convert(int stage, int to, bool scales) const {
        u8* const tile = (Values ? smem.v[to] : smem.k[to]) + Kv::row_offset(kHalf) * member;
        Codes::template convert<C.kv_dtype, C.dtype>(codes(stage), tile, lane_index(),
                                                     scales ? descales(stage) : nullptr);
    }
};

// The producer's loop, as gather_pages(): a warp converts a tile once it has started the copies of
// `code_stages` - 1 more.
template <Sm90FwdConfig C, bool Values>
__device__ __forceinline__ void produce_codes(SharedStorage<C>& smem, const FwdParams& params,
                                              const TensorMap& map_q, int member) {
    using Half = CodeHalf<C, Values>;
    using Rows = typename Half::Rows;
    PipelineState<C.q_stages> q_state;
    PipelineState<C.kv_stages> state;
    PipelineState<C.code_stages> started, converted;
    int pending = 0;  // tiles that are copied but not converted
    const int heads = C.pack_gqa ? params.shape.heads_kv : params.shape.heads_q;
    const bool draws = C.scheduler != Scheduler::Dynamic || (!Values && member == 0);
    TileSource<C> tiles(params, cta_index(), heads);
    auto& bars = kv_bars<Values>(smem);
    const Half half{smem, member};
    const ConstTensor& tensor = Values ? params.v : params.k;
    const CodeDescales& descales = Values ? cache_of(params).v : cache_of(params).k;
    const int row_bytes = (Values ? params.shape.head_dim_v : params.shape.head_dim) / per_byte(C.kv_dtype);

    // Converts the oldest tile, whose copies and those of all but the newest `Newer` tiles have arrived.
    auto convert = [&] {
        // The rows' descales were copied by other lanes.
        warp_sync();
        bars.wait_empty(state);
        half.convert(converted.stage, state.stage, descales.of_rows != nullptr);
        fence_async_shared();
        warp_sync();
        if (lane_index() == 0) mbarrier_arrive(bars.full[state.stage]);
        state.advance();
        converted.advance();
        --pending;
    };
    auto convert_all = [&] {
        cp_async_wait<0>();
#pragma unroll 1
        while (pending > 0) convert();
    };

    int index = tiles.begin(params, cta_index());
    while (index < tiles.count(params)) {
        const LoadTile<C> work(params, tiles, index, heads);
        // The consumers free the ticket, and the only Q buffer, once they have used all keys of the previous
        // work tile. If this work tile is short, some of those are not converted yet.
        if ((Values && C.q_stages == 1) || work.range.end - work.range.begin < C.code_stages) convert_all();
        int next = 0;
        if (!work.range.empty()) {
            if (Values && member == 0 && lane_index() == 0) load_q<C>(smem, params, map_q, q_state, work);
            const Rows rows = Rows::of(params, tensor, descales, work.seqlen, work.tile.batch, work.kv_head);
            int n_block = work.range.end - 1;
            auto entries = half.entries_of(rows, work.blocks.at(n_block));
#pragma unroll 1
            for (; n_block >= work.range.begin; --n_block) {
                if (draws && n_block == work.range.begin) next = draw_tile<C>(tiles, params, index);
                if (pending == C.code_stages) {
                    cp_async_wait<C.code_stages - 1>();
                    convert();
                }
                half.start(rows, row_bytes, started.stage, work.blocks.at(n_block), entries);
                cp_async_commit();
                started.advance();
                ++pending;
                // In flight while the oldest tile is converted.
                if (n_block > work.range.begin) entries = half.entries_of(rows, work.blocks.at(n_block - 1));
            }
        } else {
            if (draws) next = draw_tile<C>(tiles, params, index);
        }
        if (draws) {
            index = tiles.read(params, next, heads);
            if (lane_index() == 0) tiles.publish(smem, index);
        } else {
            index = tiles.next(smem, params, index);
        }
    }
    convert_all();
    if constexpr (C.scheduler == Scheduler::Dynamic) {
        if (draws && lane_index() == 0) retire_counter(params);
    }
}

}  // namespace fa::sm90
