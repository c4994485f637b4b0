// The producer of the SM90 forward for keys in small pages: all its warps copy rows, 16 bytes at a time, to
// where TMA would put them.
#pragma once
#include "attn/block_range.cuh"
#include "attn/paged_keys.cuh"
#include "attn/rows.cuh"
#include "attn/tensor_view.cuh"
#include "config.cuh"
#include "params.cuh"
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
// row; a warp's rows are `kRows` of every `kSweep` of a tile. Each lane looks up where some of them lie, and
// the lanes that copy them take that by a shuffle: little is left to do for each copy, of which a warp starts
// one in 30 clocks.
template <int TileN, int Lanes>
struct GatheredKeys {
    static constexpr int kRows = 32 / Lanes;
    static constexpr int kSweep = 4 * kRows;
    static constexpr int kSweeps = ceil_div(TileN, kSweep);
    static constexpr int kLookups = ceil_div(kSweeps * kRows, 32);
    static_assert(TileN % kRows == 0, "a row is there for all lanes of a warp or for none");

    const VarlenParams& varlen;
    const int* table;  // the sequence's row
    int keys;

    // The table's entries for the rows that a lane looks up, as they stand there; behind the end, those of
    // the last key.
    struct Entries {
        int of[kLookups];
    };

    __device__ __forceinline__ static int lane() { return u32(thread_index_volatile()) % 32; }
    // The row within a tile of the warp's row number `i`.
    __device__ __forceinline__ static int row(int i) {
        return i / kRows * kSweep + u32(thread_index_volatile()) / 32 * kRows + i % kRows;
    }

    __device__ __forceinline__ Entries entries_of(int n_block) const {
        Entries entries;
#pragma unroll
        for (int i = 0; i < kLookups; ++i) {
            const int key = min(n_block * TileN + row(32 * i + lane()), keys - 1);
            entries.of[i] = table[page_slot(varlen, key)];
        }
        return entries;
    }

    // Starts the copy of a tile's rows of `head`, whose entries are known: `columns` of the tensor's
    // elements, and zeros behind them, where there is no key and where the entry names no page of the cache,
    // which is counted if `Counts`.
    template <class Kv, bool Counts>
    __device__ __forceinline__ void start(u32 address, const ConstTensor& tensor, int head, int columns,
                                          int n_block, const Entries& entries) const {
        static_assert(Kv::kPanel == 8 * Lanes);
        using Tile = SmemTile<TileN, Kv::kPanel * Kv::kPanels, true>;
        static_assert(kSweep % 8 == 0, "the swizzle is the same in all sweeps");
        const int column = lane() % Lanes * 8, own_row = lane() / Lanes;
        const u16* const cache = view(tensor).row(0, 0, head) + column;
        const u32 to = address + Tile::offset(row(own_row), column);
#pragma unroll
        for (int i = 0; i < kLookups; ++i) {
            // Where the lane's row starts, in elements from the head's first: a multiple of 8, or odd where
            // nothing is.
            u32 low = 1, high = 0;
            const int own = row(32 * i + lane()), key = n_block * TileN + own, entry = entries.of[i];
            if (own < TileN && key < keys) {
                if (u32(entry) < u32(varlen.pages)) {
                    const int first = key - page_slot(varlen, key) * varlen.page;
                    const i64 at = entry * tensor.strides.batch + first * tensor.strides.seq;
                    low = u32(at);
                    high = u32(u64(at) >> 32);
                } else if (Counts && varlen.page_faults != nullptr) {
                    atomic_add(varlen.page_faults, 1u);
                }
            }
            constexpr int kSweepsOfLookup = 32 / kRows;
#pragma unroll
            for (int j = 0; j < min_of(kSweepsOfLookup, kSweeps - i * kSweepsOfLookup); ++j) {
                const int sweep = i * kSweepsOfLookup + j;
                const u32 from_low = shuffle_from(low, j * kRows + own_row);
                const u32 from_high = shuffle_from(high, j * kRows + own_row);
                if (TileN % kSweep != 0 && row(sweep * kRows) >= TileN) break;
                const u16* const from = cache + i64(u64(from_high) << 32 | (from_low & ~7u));
#pragma unroll
                for (int panel = 0; panel < Kv::kPanels; ++panel) {
                    const bool copied = (from_low & 1) == 0 && panel * Kv::kPanel + column < columns;
                    cp_async_16(to + sweep * kSweep * Tile::kRowBytes + panel * Kv::kPanelBytes,
                                from + panel * Kv::kPanel, copied ? 16 : 0);
                }
            }
        }
    }
};

// K or V, and whether entries of the table that name no page are counted with it.
template <class Tiles, bool Counts>
struct GatheredSide {
    using Tile = Tiles;
    static constexpr bool kCounts = Counts;
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
        const LoadTile<C> work(params, tiles, index, heads);
        const Keys keys{params.varlen,
                        params.varlen.page_table + i64(work.tile.batch) * params.varlen.table_stride,
                        work.seqlen.k()};
        using Entries = typename Keys::Entries;

        auto q = [&] {
            if (first_warp && lane_index() == 0)
                load_q<C>(smem, params, map_q, q_state, work.tile, work.seqlen);
        };
        auto load = [&](auto side, u8* dst, const ConstTensor& tensor, int columns, auto& bars,
                        const KvState& own, int n_block, const Entries& entries) {
            bars.wait_empty(own);
            using Side = decltype(side);
            keys.template start<typename Side::Tile, Side::kCounts>(smem_address(dst), tensor, work.kv_head,
                                                                    columns, n_block, entries);
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
        auto load_k = [&](const KvState& own, int n_block, const Entries& entries) {
            load(GatheredSide<typename T::K, true>{}, smem.k[own.stage], params.k, params.shape.head_dim,
                 smem.k_bars, own, n_block, entries);
        };
        auto load_v = [&](int n_block, const Entries& entries) {
            load(GatheredSide<typename T::V, false>{}, smem.v[state.stage], params.v, params.shape.head_dim_v,
                 smem.v_bars, state, n_block, entries);
            state.advance();
        };

        int next = 0;
        if (!work.range.empty()) {
            Entries entries = keys.entries_of(work.range.end - 1);
            if constexpr (C.q_stages > 1) q();
            load_k(state, work.range.end - 1, entries);
            if constexpr (C.q_stages == 1) q();
#pragma unroll 1
            for (int n_block = work.range.end - 1; n_block > work.range.begin; --n_block) {
                const Entries before = keys.entries_of(n_block - 1);
                KvState ahead = state;
                ahead.advance();
                load_k(ahead, n_block - 1, before);
                load_v(n_block, entries);
                entries = before;
            }
            if (draws) next = draw_tile<C>(tiles, params, index);
            load_v(work.range.begin, entries);
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
