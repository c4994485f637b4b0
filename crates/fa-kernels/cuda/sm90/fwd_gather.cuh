// The producer of the SM90 forward for keys in small pages: all its warps copy rows, 16 bytes at a time, to
// where TMA would put them.
#pragma once
#include "attn/block_range.cuh"
#include "attn/paged_keys.cuh"
#include "attn/rows.cuh"
#include "attn/tensor_view.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "sm90/fwd_layout.cuh"
#include "sm90/fwd_producer.cuh"
#include "sm90/fwd_tiles.cuh"
#include "tile/pipeline.cuh"
#include "tile/smem_tile.cuh"

namespace fa::sm90 {

// Keys of one sequence and head in pages, copied row by row. Neighbouring lanes take the chunks of a panel's
// row; a warp's rows are `kRows` of every `kSweep` of a tile. Each lane looks up the pages of some of them.
template <int TileN, int Lanes>
struct GatheredKeys {
    static constexpr int kRows = 32 / Lanes;
    static constexpr int kSweep = 4 * kRows;
    static constexpr int kSweeps = ceil_div(TileN, kSweep);
    static constexpr int kLookups = ceil_div(kSweeps * kRows, 32);

    const VarlenParams& varlen;
    const int* table;  // the sequence's row
    int keys;

    // Pages of the rows that a lane looks up; -1 for rows without keys.
    struct Pages {
        int of[kLookups];
    };

    // The row within a tile of the warp's row number `i`.
    __device__ __forceinline__ static int row(int i) {
        const int warp = thread_index_volatile() / 32;
        return i / kRows * kSweep + warp * kRows + i % kRows;
    }

    __device__ __forceinline__ Pages pages_of(int n_block) const {
        Pages pages;
#pragma unroll
        for (int i = 0; i < kLookups; ++i) {
            const int own = row(32 * i + thread_index_volatile() % 32), key = n_block * TileN + own;
            pages.of[i] = -1;
            if (own < TileN && key < keys) {
                const int page = table[page_slot(varlen, key)];
                if (u32(page) < u32(varlen.pages)) {
                    pages.of[i] = page;
                } else if (varlen.page_faults != nullptr) {
                    atomic_add(varlen.page_faults, 1u);
                }
            }
        }
        return pages;
    }

    // Starts the copy of a tile's rows of `head`, whose pages are known: `columns` of the tensor's elements,
    // and zeros behind them and where there is no key.
    template <class Kv>
    __device__ __forceinline__ void start(u32 address, const ConstTensor& tensor, int head, int columns,
                                          int n_block, const Pages& pages) const {
        static_assert(Kv::kPanel == 8 * Lanes);
        using Tile = SmemTile<TileN, Kv::kPanel * Kv::kPanels, true>;
        const u16* const cache = view(tensor).row(0, 0, head);
#pragma unroll 1
        for (int sweep = 0; sweep < kSweeps; ++sweep) {
            const int lane = thread_index_volatile() % 32, column = lane % Lanes * 8;
            const int own = row(sweep * kRows + lane / Lanes), number = sweep * kRows + lane / Lanes;
            int page = shuffle_from(pages.of[0], number % 32);
            if constexpr (kLookups > 1) {
                const int other = shuffle_from(pages.of[1], number % 32);
                if (number >= 32) page = other;
            }
            if (TileN % kSweep != 0 && own >= TileN) break;
            const int key = n_block * TileN + own;
            const int first = key - page_slot(varlen, key) * varlen.page;
            const u16* const from =
                cache + max(page, 0) * tensor.strides.batch + first * tensor.strides.seq + column;
            const u32 to = address + Tile::offset(own, column);
#pragma unroll
            for (int i = 0; i < Kv::kPanels; ++i) {
                const bool copied = page >= 0 && i * Kv::kPanel + column < columns;
                cp_async_16(to + i * Kv::kPanelBytes, from + i * Kv::kPanel, copied ? 16 : 0);
            }
        }
    }
};

// Tells the consumers of a tile, if there is one, when all but the `Newer` newest groups of the warp's copies
// are done.
template <int Newer>
__device__ __forceinline__ void arrive_copied(Mbarrier*& pending) {
    if (pending == nullptr) return;
    cp_async_wait<Newer>();
    fence_async_shared();
    warp_sync();
    if (lane_index() == 0) mbarrier_arrive(*pending);
    pending = nullptr;
}

__device__ __forceinline__ void arrive_all(Mbarrier* (&pending)[2]) {
    arrive_copied<1>(pending[0]);
    arrive_copied<0>(pending[1]);
}

// Tiles of K and V that a warp copies at once. A stage that it waits for may be free only when consumers have
// seen the copies before: the only stage; of two, while warpgroups that take turns stand at different tiles;
// and a single Q that is in use until the last V has been multiplied.
template <Sm90FwdConfig C>
constexpr int kGathersUnderWay = C.kv_stages == 1 || (C.q_stages == 1 && !C.overlap_wg) ? 1
                                 : C.kv_stages == 2 && C.ping_pong                      ? 2
                                                                                        : 3;

// By four warps. Each tells the consumers of a tile when its own part is there: after it has started the
// copies of the next ones.
template <Sm90FwdConfig C>
__device__ __forceinline__ void gather_pages(SharedStorage<C>& smem, const FwdParams& params,
                                             const TensorMap& map_q) {
    using T = Traits<C>;
    using KvState = PipelineState<C.kv_stages>;
    using Keys = GatheredKeys<C.tile_n, T::K::kPanel / 8>;
    static_assert(T::K::kPanel == T::V::kPanel);
    constexpr int kUnderWay = kGathersUnderWay<C>;
    PipelineState<C.q_stages> q_state;
    // Of V's next stage; K's is the same before a tile of queries, and one ahead while its keys are loaded.
    KvState state;
    const int heads = C.pack_gqa ? params.shape.heads_kv : params.shape.heads_q;
    const bool first_warp = warp_index() == 0;
    // The first warp draws dynamic tiles, and the others take its tickets.
    const bool draws = C.scheduler != Scheduler::Dynamic || first_warp;
    TileSource<C> tiles(params, cta_index(), heads);
    // Of the tiles whose copies are under way, the older one first.
    Mbarrier* pending[2] = {nullptr, nullptr};

    int index = tiles.begin(params, cta_index());
    while (index < tiles.count(params)) {
        const WorkTile tile = tiles.tile_of(params, index, heads);
        const auto seqlen = tiles.seqlen_of(params, tile);
        const BlockRange range =
            tile_blocks<C>(VisibleKeys<C>{params.shape, seqlen}, Rows<C.pack_gqa>(params.shape), tile);
        const Keys keys{params.varlen,
                        params.varlen.page_table + i64(tile.batch) * params.varlen.table_stride, seqlen.k()};
        const int kv_head = C.pack_gqa ? tile.head : tile.head / params.shape.group_size;
        using Pages = typename Keys::Pages;

        auto q = [&] {
            if (first_warp && lane_index() == 0) load_q<C>(smem, params, map_q, q_state, tile, seqlen);
        };
        auto load = [&](auto tile_type, u8* dst, const ConstTensor& tensor, int columns, auto& bars,
                        const KvState& own, int n_block, const Pages& pages) {
            bars.wait_empty(own);
            keys.template start<decltype(tile_type)>(smem_address(dst), tensor, kv_head, columns, n_block,
                                                     pages);
            cp_async_commit();
            if constexpr (kUnderWay == 3) {
                arrive_copied<2>(pending[0]);
                pending[0] = pending[1];
            } else {
                arrive_copied<1>(pending[1]);
            }
            pending[1] = &bars.full[own.stage];
            if constexpr (kUnderWay == 1) arrive_all(pending);
        };
        auto load_k = [&](const KvState& own, int n_block, const Pages& pages) {
            load(typename T::K{}, smem.k[own.stage], params.k, params.shape.head_dim, smem.k_bars, own,
                 n_block, pages);
        };
        auto load_v = [&](int n_block, const Pages& pages) {
            load(typename T::V{}, smem.v[state.stage], params.v, params.shape.head_dim_v, smem.v_bars, state,
                 n_block, pages);
            state.advance();
        };

        int next = 0;
        if (!range.empty()) {
            Pages pages = keys.pages_of(range.end - 1);
            if constexpr (C.q_stages > 1) q();
            load_k(state, range.end - 1, pages);
            if constexpr (C.q_stages == 1) q();
#pragma unroll 1
            for (int n_block = range.end - 1; n_block > range.begin; --n_block) {
                const Pages before = keys.pages_of(n_block - 1);
                KvState ahead = state;
                ahead.advance();
                load_k(ahead, n_block - 1, before);
                load_v(n_block, pages);
                pages = before;
            }
            if (draws) next = draw_tile<C>(tiles, params, index);
            load_v(range.begin, pages);
        } else {
            // The consumers may need the last tile's keys before they take this one's ticket.
            arrive_all(pending);
            if (draws) next = draw_tile<C>(tiles, params, index);
        }
        if (draws) {
            index = tiles.read(params, next, heads);
            if (lane_index() == 0) tiles.publish(smem, index);
        } else {
            index = tiles.next(smem, params, index, lane_index() == 0);
        }
    }
    arrive_all(pending);
    if constexpr (C.scheduler == Scheduler::Dynamic) {
        if (first_warp && lane_index() == 0) retire_counter(params);
    }
}

}  // namespace fa::sm90
