// The producer of the SM90 forward for keys in small pages: two warps copy rows of K, and two copy rows of V,
// by cp.async, 16 bytes at a time, into the layout that TMA would write. Rows that are contiguous in the
// cache are loaded by TMA.
#pragma once
#include "attn/block_range.cuh"
#include "attn/paged_keys.cuh"
#include "attn/ragged.cuh"
#include "attn/rows.cuh"
#include "attn/tensor_view.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/multiply.cuh"
#include "ptx/segment.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "sm90/fwd_layout.cuh"
#include "sm90/fwd_producer.cuh"
#include "sm90/fwd_shift.cuh"
#include "sm90/fwd_tiles.cuh"
#include "tile/pipeline.cuh"
#include "tile/smem_tile.cuh"

namespace fa::sm90 {

// The unit of a cache's TmaStrides, in bytes. (The launch keeps it below 2^32. A cache of one page of one row
// needs none.)
__device__ __forceinline__ u32 stride_unit(const TmaStrides& in_units, const RowStrides& strides) {
    const i64 stride = in_units.entry != 0 ? strides.batch : strides.seq;
    const u32 units = in_units.entry != 0 ? in_units.entry : in_units.row;
    return u32(u64(stride) * sizeof(u16) / max(units, 1u));
}

// The keys of one sequence and head in pages, copied row by row. A warp copies one half of a tile's rows,
// `kRows` per sweep; `Lanes` neighbouring lanes copy the chunks of one panel row. The lanes of such a group
// share the page lookups of its rows and exchange the results by shuffles. Beside the consumers a producer
// warp takes about nine clocks per instruction, so the code minimises instructions.
template <int TileN, int Lanes>
struct GatheredKeys {
    static constexpr int kRows = 32 / Lanes;
    static constexpr int kHalf = TileN / 2;
    static constexpr int kSweeps = kHalf / kRows;
    static constexpr int kLookups = ceil_div(kHalf, 32);
    static_assert(kHalf % 8 == 0, "the swizzle repeats after eight rows: a box may start at each half");
    static_assert(kHalf % kRows == 0);
    static_assert(kHalf >= 32, "each lane's first lookup is of a row of the half");

    // Marks a row that does not exist. Positions in a cache are below 2^31.
    static constexpr u32 kNowhere = ~0u;

    const VarlenParams& varlen;
    const TmaStrides& strides;
    const int* table;  // the sequence's row of the page table
    int keys;
    int shift;  // columns of a tile before the rows'
    int own;    // own_lookup()

    // The table entries, unchecked, of the rows that a lane looks up; past the end, that of the last key.
    struct Entries {
        int of[kLookups];
    };

    // Within the warp's half, the first row that the lane looks up; the others follow 32 rows apart. (The
    // lanes of a group look up the rows of successive sweeps.)
    __device__ __forceinline__ static int own_lookup() {
        return lane_index() / Lanes + kRows * (lane_index() % Lanes);
    }
    // Whether the lane's i-th lookup is of a row of the half; the first one always is.
    __device__ __forceinline__ bool in_half(int i) const {
        return 32 * (i + 1) <= kHalf || own < kHalf - 32 * i;
    }
    // Rows from the lane's first lookup to its i-th: none where that is outside the half.
    __device__ __forceinline__ int from_first(int i) const { return in_half(i) ? 32 * i : 0; }
    // The warp's first row within a tile.
    __device__ __forceinline__ static int first_row() {
        return u32(thread_index_volatile()) / 32 % 2 * kHalf;
    }
    // The key of the lane's i-th lookup; past the end, the last key.
    __device__ __forceinline__ int key_of(int n_block, int i) const {
        return min(n_block * TileN + first_row() + own + from_first(i), keys - 1);
    }

    // The entries of the rows that the lane looks up.
    __device__ __forceinline__ Entries entries_of(int n_block) const {
        Entries entries;
#pragma unroll
        for (int i = 0; i < kLookups; ++i) entries.of[i] = table[page_slot(varlen, key_of(n_block, i))];
        return entries;
    }

    // Whether all of the warp's entries are pages of the cache.
    __device__ __forceinline__ bool are_valid(const Entries& entries) const {
        bool valid = true;
#pragma unroll
        for (int entry : entries.of) valid = valid && u32(entry) < u32(varlen.pages);
        return !warp_any(!valid);
    }

    // Number of keys in the warp's half of a tile.
    __device__ __forceinline__ int half_keys(int n_block) const {
        return max(0, min(keys - n_block * TileN - first_row(), kHalf));
    }

    // Whether the warp's rows are contiguous in the cache, so that one TMA box loads them: consecutive pages
    // of a cache without gaps between pages. All entries are valid.
    __device__ __forceinline__ bool in_one_piece(int n_block, const Entries& entries) const {
        bool apart = strides.entry != u32(varlen.page) * strides.row;
        int from_slot = 0;  // page in the cache less its index in the sequence
#pragma unroll
        for (int i = 0; i < kLookups; ++i) {
            const int slot = page_slot(varlen, key_of(n_block, i));
            if (i == 0) from_slot = shuffle_from(entries.of[0] - slot, 0);
            apart = apart || entries.of[i] - slot != from_slot;
        }
        return !warp_any(apart);
    }

    // Such rows as a TMA box: `entry` is that of the warp's first row.
    __device__ __forceinline__ RaggedRows box(int n_block, int head, int entry) const {
        const int key = n_block * TileN + first_row();
        const int first = key - page_slot(varlen, key) * varlen.page;
        const int count = half_keys(n_block);
        return {strides, count > 0 ? entry : 0, head, count > 0 ? first : 0, count};
    }

    // The same with pages of one key, for a tile that has all its rows: their entries are next to each other
    // in the table.
    __device__ __forceinline__ const int* first_entry(int n_block) const {
        return table + (n_block * TileN + first_row() + own);
    }
    __device__ __forceinline__ Entries entries_at(const int* first) const {
        Entries entries;
#pragma unroll
        for (int i = 0; i < kLookups; ++i) entries.of[i] = first[from_first(i)];
        return entries;
    }
    __device__ __forceinline__ bool are_neighbours(const Entries& entries) const {
        // Most tiles of scattered rows are seen by the lanes' own entries.
        bool apart = false;
#pragma unroll
        for (int i = 1; i < kLookups; ++i) apart = apart || entries.of[i] - entries.of[0] != from_first(i);
        if (kLookups > 1 && warp_any(apart)) return false;
        const int from_slot = entries.of[0] - own;
        return !warp_any(from_slot != shuffle_from(from_slot, 0));
    }
    __device__ __forceinline__ RaggedRows full_box(int head, int entry) const {
        return {strides, entry, head, 0, kHalf};
    }

    // Loads a box. One lane calls it.
    template <class Kv>
    __device__ __forceinline__ void load(u8* dst, const TensorMap& map, Mbarrier& full,
                                         const RaggedRows& rows) const {
        mbarrier_arrive_expect(full, Kv::kBytes / 2);
#pragma unroll
        for (int i = 0; i < Kv::kPanels; ++i) {
            load_ragged(dst + i * Kv::kPanelBytes + Kv::row_offset(kHalf) * (first_row() / kHalf), map, full,
                        i * Kv::kPanel - shift, rows, 0, L2Policy::EvictLast);
        }
    }

    // Positions of the rows that a lane looks up, in units of the strides, relative to the head's first row.
    struct Rows {
        u32 at[kLookups];
    };

    // Computes those positions: kNowhere past the end, and where the entry is not a page of the cache, which
    // is counted in page_faults if `Counts`.
    template <bool Counts>
    __device__ __forceinline__ Rows rows_of(int n_block, const Entries& entries) const {
        Rows rows;
#pragma unroll
        for (int i = 0; i < kLookups; ++i) {
            const int key = n_block * TileN + first_row() + own + 32 * i;
            const int entry = entries.of[i];
            rows.at[i] = kNowhere;
            if (in_half(i) && key < keys) {
                if (u32(entry) < u32(varlen.pages)) {
                    const int first = key - page_slot(varlen, key) * varlen.page;
                    rows.at[i] = u32(entry) * strides.entry + u32(first) * strides.row;
                } else if (Counts && varlen.page_faults != nullptr) {
                    atomic_add(varlen.page_faults, 1u);
                }
            }
        }
        return rows;
    }

    template <class Kv>
    using Swizzled = SmemTile<TileN, Kv::kPanel * Kv::kPanels, true>;

    // Where a lane copies to in a stage at `address`, and from in the head's first row: its first chunk.
    template <class Kv>
    __device__ __forceinline__ static u32 lane_target(u32 address) {
        using Tile = Swizzled<Kv>;
        const int lane = u32(thread_index_volatile()) % 32;
        return address + first_row() * Tile::kRowBytes + Tile::offset(lane / Lanes, lane % Lanes * 8);
    }
    __device__ __forceinline__ static int lane_column() { return u32(thread_index_volatile()) % Lanes * 8; }

    // Starts to copy the warp's half of a tile of a head to the lane's target. `cache` is the head's first
    // row in the cache, at the lane's `column`; positions are in units of `unit` bytes. Unless AllExist,
    // columns outside [0, columns) and rows at kNowhere become zeros.
    template <class Kv, bool AllExist>
    __device__ __forceinline__ static void start(u32 to, const u16* cache, u32 unit, int column, int columns,
                                                 const Rows& rows) {
        using Tile = Swizzled<Kv>;
        static_assert(Kv::kPanel == 8 * Lanes);
        // Sweeps of four rows of 128 bytes alternate between two swizzles.
        static_assert(kRows % 8 == 0 || (kRows == 4 && Tile::kRowBytes == 128));
        constexpr u32 kTurn = kRows == 4 ? 4 << 4 : 0;
#pragma unroll
        for (int sweep = 0; sweep < kSweeps; ++sweep) {
            const u32 at = shuffle_within<Lanes>(rows.at[sweep / Lanes], sweep % Lanes);
            const bool exists = AllExist || at != kNowhere;
            const u16* const from = bytes_after(cache, exists ? at : 0, unit);
            const u32 row = (sweep % 2 == 0 ? to : to ^ kTurn) + sweep * kRows * Tile::kRowBytes;
#pragma unroll
            for (int panel = 0; panel < Kv::kPanels; ++panel) {
                const bool copied = AllExist || (exists && u32(panel * Kv::kPanel + column) < u32(columns));
                cp_async_16(row + panel * Kv::kPanelBytes, from + panel * Kv::kPanel, copied ? 16 : 0);
            }
        }
    }
};

// How many tiles before the newest a warp may have in flight without having signalled them to the consumers.
// It must not hold back a tile whose consumption frees the stage that it waits for next: with one stage that
// is every tile; with ping-pong, where a warpgroup may skip a tile, also the one after it.
template <Sm90FwdConfig C>
constexpr int kUnsignalled = max_of(0, min_of(2, C.kv_stages - (C.ping_pong ? 2 : 1)));

// The tiles that a warp copies, in order. It signals a tile, on its stage's full barrier, once it has started
// the copies of `Unsignalled` more.
template <int Unsignalled>
struct CopiedTiles {
    int stages[Unsignalled + 1];  // stages of the tiles not yet signalled, oldest first; -1 for none

    __device__ __forceinline__ CopiedTiles() {
        for (int& stage : stages) stage = -1;
    }

    // Records that the copies of a tile to `stage` have started; -1 for a TMA load, which signals by itself.
    template <class Bars>
    __device__ __forceinline__ void started(Bars& bars, int stage) {
        cp_async_commit();
        stages[Unsignalled] = stage;
        signal<Unsignalled>(bars);
    }

    // Waits for all tiles and signals them.
    template <class Bars>
    __device__ __forceinline__ void finish(Bars& bars) {
#pragma unroll
        for (int i = 0; i < Unsignalled; ++i) signal<0>(bars);
    }

    // Waits until all but the newest `Newer` tiles have arrived, and signals the oldest, if any.
    template <int Newer, class Bars>
    __device__ __forceinline__ void signal(Bars& bars) {
        if (stages[0] >= 0) {
            cp_async_wait<Newer>();
            fence_async_shared();
            warp_sync();
            if (lane_index() == 0) mbarrier_arrive(bars.full[stages[0]]);
        }
#pragma unroll
        for (int i = 0; i < Unsignalled; ++i) stages[i] = stages[i + 1];
        stages[Unsignalled] = -1;
    }
};

// The producer's loop: loads K, or with `Values` Q and V, by two warps, of which this is warp `member`. K's
// first warp draws the work tiles of a dynamic scheduler; the other warps receive them.
template <Sm90FwdConfig C, bool Values>
__device__ __forceinline__ void gather_pages(SharedStorage<C>& smem, const FwdParams& params,
                                             const TensorMap& map_q, const TensorMap& map, int member) {
    using T = Traits<C>;
    using Kv = Either<Values, typename T::V, typename T::K>;
    using Keys = GatheredKeys<C.tile_n, Kv::kPanel / 8>;
    using Entries = typename Keys::Entries;
    using Rows = typename Keys::Rows;
    PipelineState<C.q_stages> q_state;
    PipelineState<C.kv_stages> state;
    const int heads = C.pack_gqa ? params.shape.heads_kv : params.shape.heads_q;
    const bool draws = C.scheduler != Scheduler::Dynamic || (!Values && member == 0);
    TileSource<C> tiles(params, cta_index(), heads);
    auto& bars = kv_bars<Values>(smem);
    CopiedTiles<kUnsignalled<C>> copied;
    const ConstTensor& tensor = Values ? params.v : params.k;
    const TmaStrides& strides = Values ? params.varlen.tma_v : params.varlen.tma_k;
    const int columns = Values ? params.shape.head_dim_v : params.shape.head_dim;
    const u32 unit = stride_unit(strides, tensor.strides);
    const bool one_key =
        params.varlen.page == 1 && strides.entry == strides.row && columns == Kv::kPanel * Kv::kPanels;
    const int own = Keys::own_lookup();

    int index = tiles.begin(params, cta_index());
    while (index < tiles.count(params)) {
        const LoadTile<C> work(params, tiles, index, heads);
        const int shift = kv_shift<C, Values>(params, work.kv_head);
        const Keys keys{params.varlen, strides, work.table(params), work.seqlen.k(), shift, own};
        const u16* const first = view(tensor).row(0, 0, work.kv_head);

        // The consumers free the ticket, and the only Q buffer, once they have used all keys of the previous
        // work tile. If this work tile is short, some of those are not signalled yet.
        if ((Values && C.q_stages == 1) || work.range.end - work.range.begin <= kUnsignalled<C>)
            copied.finish(bars);
        int next = 0;
        if (!work.range.empty()) {
            if (Values && member == 0 && lane_index() == 0) load_q<C>(smem, params, map_q, q_state, work);
            int n_block = work.range.end - 1;
            Entries entries = keys.entries_of(work.blocks.at(n_block));
            // Loads tile n_block: its `box` if its rows are contiguous, else by `copy`. `prefetch` loads the
            // next tile's entries into the registers of this tile's, since a move would wait for them; they
            // are in flight while this tile is copied.
            auto load_tile = [&](bool contiguous, auto prefetch, auto box, auto copy) {
                const int entry = entries.of[0];
                if (draws && n_block == work.range.begin) next = draw_tile<C>(tiles, params, index);
                // If the kernel is bound by products, signal the previous tile, which has arrived by now: a
                // fence after this tile's copies would wait for them too. (If it is bound by memory, a new
                // copy must not wait for an older one.)
                if constexpr (C.num_wg > 1) copied.finish(bars);
                if (n_block > work.range.begin) prefetch();
                bars.wait_empty(state);
                if (contiguous) {
                    // No lane may start the next phase before all lanes have seen the previous one end.
                    warp_sync();
                    u8* const dst = Values ? smem.v[state.stage] : smem.k[state.stage];
                    if (lane_index() == 0)
                        keys.template load<Kv>(dst, map, bars.full[state.stage], box(entry));
                } else {
                    copy();
                }
                copied.started(bars, contiguous ? -1 : state.stage);
                state.advance();
                --n_block;
            };
#pragma unroll 1
            do {
                const int block = work.blocks.at(n_block);
                const bool contiguous = keys.are_valid(entries) && keys.in_one_piece(block, entries);
                Rows rows{};
                if (!contiguous) rows = keys.template rows_of<!Values>(block, entries);
                load_tile(
                    contiguous, [&] { entries = keys.entries_of(work.blocks.at(n_block - 1)); },
                    [&](int entry) { return keys.box(block, work.kv_head, entry); },
                    [&] {
                        const int column = Keys::lane_column() - shift;
                        u8* const dst = Values ? smem.v[state.stage] : smem.k[state.stage];
                        Keys::template start<Kv, false>(Keys::template lane_target<Kv>(smem_address(dst)),
                                                        first + column, unit, column, columns, rows);
                    });
                if (kMaskProgram || !one_key) continue;
                // All tiles but the sequence's last have all their rows.
                const int* at = keys.first_entry(n_block);
                const u16* const cache = first + Keys::lane_column();
                const u32 to = Keys::template lane_target<Kv>(smem_address(Values ? smem.v[0] : smem.k[0]));
#pragma unroll 1
                while (n_block >= work.range.begin && keys.are_valid(entries)) {
                    Rows direct;
#pragma unroll
                    for (int i = 0; i < Keys::kLookups; ++i) direct.at[i] = entries.of[i];
                    at -= C.tile_n;
                    load_tile(
                        keys.are_neighbours(entries), [&] { entries = keys.entries_at(at); },
                        [&](int entry) { return keys.full_box(work.kv_head, entry); },
                        [&] {
                            Keys::template start<Kv, true>(to + state.stage * Kv::kBytes, cache,
                                                           unit * strides.entry, 0, columns, direct);
                        });
                }
            } while (n_block >= work.range.begin);
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
    copied.finish(bars);
    if constexpr (C.scheduler == Scheduler::Dynamic) {
        if (draws && lane_index() == 0) retire_counter(params);
    }
}

}  // namespace fa::sm90
