// Attention forward for SM90: one warpgroup loads by TMA, the others multiply by wgmma, 64 query rows each.
#pragma once
#include "attn/alibi.cuh"
#include "attn/block_range.cuh"
#include "attn/epilogue.cuh"
#include "attn/mask.cuh"
#include "attn/paged_keys.cuh"
#include "attn/ragged.cuh"
#include "attn/rows.cuh"
#include "attn/scheduler.cuh"
#include "attn/score_mod.cuh"
#include "attn/seqlen.cuh"
#include "attn/softmax.cuh"
#include "attn/split.cuh"
#include "attn/visibility.cuh"
#include "config.cuh"
#include "params.cuh"
#include "ptx/address.cuh"
#include "ptx/atomic.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "tile/descriptor.cuh"
#include "tile/panel.cuh"
#include "tile/pipeline.cuh"
#include "tile/stmatrix_tile.cuh"

namespace fa::sm90 {

// ---- Config -------------------------------------------------------------------------------------

template <Sm90FwdConfig C>
struct Traits {
    static_assert(C.tile_m == 64 * C.num_wg, "one warpgroup per 64 rows: the m64 of wgmma");
    static_assert(C.tile_n % 16 == 0 && C.tile_n <= 256, "the n of wgmma and the k16 steps of P V");
    static_assert(C.head_dim % 32 == 0 && C.head_dim_v % 32 == 0 && C.head_dim_v <= 256);
    static_assert(C.cluster_m == 1 || C.mask == MaskKind::Full, "CTAs of a cluster share their keys");
    static_assert(C.cluster_m == 1 || C.scheduler != Scheduler::Dynamic,
                  "CTAs of a cluster take neighbouring tiles");
    static_assert(C.num_wg >= 2 || !C.ping_pong);
    static_assert(C.cluster_m == 1 || (!C.varied && !C.split), "CTAs of a cluster load the same keys");
    static_assert(C.varied || !C.paged, "the lengths of a cache in pages are on the device");

    // P is computed against the current maximum, and its sum shows whether the scores have outgrown it. In
    // the tiles (nearly all) where they have not, no maximum is taken and O is not rescaled. Any reference
    // within 2^threshold of the maximum gives the same relative precision.
    static constexpr bool kLazyMax = C.overlap_wg && C.pv_is_rs && C.rescale_threshold > 0;

    // Whether a warpgroup skips tiles of keys that only rows further down see: tiles narrower than tile_m. It
    // releases all their K before it waits for the first V: of two tiles at most, and with two stages.
    static constexpr bool kSkipsBlocks =
        C.mask != MaskKind::Full && C.tile_n < C.tile_m && C.tile_n >= 64 && C.kv_stages >= 2;

    static constexpr int kConsumerWarps = 4 * C.num_wg;
    // Registers per thread after setmaxnreg: what the producers leave of 64K, in multiples of 8. Lengths and
    // pages of the device take some more.
    static constexpr int kMoreRegs = C.varied && C.num_wg == 2 ? 8 : 0;
    static constexpr int kProducerRegs = (C.num_wg == 1 ? 56 : C.num_wg == 2 ? 24 : 32) + 2 * kMoreRegs;
    static constexpr int kConsumerRegs = (C.num_wg == 1 ? 256 : C.num_wg == 2 ? 240 : 160) - kMoreRegs;

    using Q = PanelTile<C.tile_m, C.head_dim>;
    using K = PanelTile<C.tile_n, C.head_dim>;
    using V = PanelTile<C.tile_n, C.head_dim_v>;
    using P = PanelTile<64, C.tile_n>;  // one per warpgroup

    using MmaS = wgmma::Mma<C.dtype, C.tile_n>;
    using MmaO = wgmma::Mma<C.dtype, C.head_dim_v>;
};

// ---- Shared memory ------------------------------------------------------------------------------

// What only some configs have takes no space in the others.
template <int Bytes, int Groups>
struct PTiles {
    alignas(1024) u8 tiles[Groups][Bytes];
};
struct NoPTiles {};
template <bool Varied>
struct TileTicket {
    PipelineBarriers<1> bars;
    alignas(16) int next[Varied ? 12 : 4];  // its number; of a varied batch also what and how long it is
};
struct NoTileTicket {};

// The planner's sm90_fwd_smem names the same buffers in the same order; the generated unit asserts the size.
template <Sm90FwdConfig C>
struct alignas(1024) SharedStorage {
    using T = Traits<C>;
    alignas(1024) u8 q[C.q_stages][T::Q::kBytes];
    alignas(1024) u8 k[C.kv_stages][T::K::kBytes];
    alignas(1024) u8 v[C.kv_stages][T::V::kBytes];
    [[no_unique_address]] Either<C.pv_is_rs, NoPTiles, PTiles<T::P::kBytes, C.num_wg>> p;
    PipelineBarriers<C.q_stages> q_bars;
    PipelineBarriers<C.kv_stages, C.cluster_m> k_bars;
    PipelineBarriers<C.kv_stages, C.cluster_m> v_bars;
    [[no_unique_address]] Either<C.scheduler == Scheduler::Dynamic, TileTicket<C.varied>, NoTileTicket>
        ticket;
};

// ---- Roles --------------------------------------------------------------------------------------

// A tile of a varied batch and the lengths of its sequence, as the producer read them.
struct VariedTile {
    WorkTile tile;
    int queries, keys, first_query, first_key;
};
struct NoVariedTile {};

// The work tiles of a CTA. Static and per-tile orders are arithmetic; dynamic tiles are drawn by the producer
// and reach the consumers through shared memory, one tile ahead: of varied batches with what the plan and the
// sequence's starts say of them, which are far away too.
template <Sm90FwdConfig C>
struct TileSource {
    static constexpr bool kDynamic = C.scheduler == Scheduler::Dynamic;
    // Where a warp loads pages, two warpgroups and more leave its lanes no registers for that.
    static constexpr bool kReadsAhead = kDynamic && C.varied && (!C.paged || C.num_wg == 1);
    int varied_tiles = 0;  // of a plan; without one they are a parameter
    [[no_unique_address]] Either<kReadsAhead, VariedTile, NoVariedTile> own;
    PipelineState<1> state;

    __device__ __forceinline__ explicit TileSource(const FwdParams& params, int first, int heads) {
        if constexpr (C.varied) varied_tiles = work_tiles<true>(params);
        read(params, first, heads);
    }

    // Reads what tile `index` is.
    __device__ __forceinline__ void read(const FwdParams& params, int index, int heads) {
        if constexpr (kReadsAhead) {
            if (index >= varied_tiles) return;
            own.tile = work_tile_at<C.tile_order, true, C.split>(params, index, heads);
            const auto seqlen = Seqlen<true>::of(params, own.tile.batch);
            own.queries = seqlen.q();
            own.keys = seqlen.k();
            own.first_query = seqlen.q_offset();
            own.first_key = seqlen.k_offset();
        }
    }

    __device__ __forceinline__ WorkTile tile_of(const FwdParams& params, int index, int heads) const {
        if constexpr (kReadsAhead) {
            return own.tile;
        } else {
            return work_tile_at<C.tile_order, C.varied, C.split>(params, index, heads);
        }
    }
    __device__ __forceinline__ Seqlen<C.varied> seqlen_of(const FwdParams& params,
                                                          const WorkTile& tile) const {
        if constexpr (kReadsAhead) {
            return {own.queries,          own.keys, own.first_query, own.first_key, params.varlen.total_q,
                    params.shape.seqlen_q};
        } else {
            return Seqlen<C.varied>::of(params, tile.batch);
        }
    }

    // Tiles of the launch.
    __device__ __forceinline__ int count(const FwdParams& params) const {
        return C.varied ? varied_tiles : params.num_tiles;
    }

    // Producer: draws the tile after this one, some loads before it is needed: the counter is far away.
    __device__ __forceinline__ int draw(const FwdParams& params, int tile) {
        if constexpr (C.scheduler == Scheduler::PerTile) return count(params);
        if constexpr (C.scheduler == Scheduler::Static) return tile + cta_count();
        return cta_count() + atomic_add(&params.tile_counter[0], 1u);
    }

    // Producer: publishes it to the consumers.
    __device__ __forceinline__ void publish(SharedStorage<C>& smem, int next) {
        if constexpr (kDynamic) {
            mbarrier_wait(smem.ticket.bars.empty[0], state.phase ^ 1);
            int* const ticket = smem.ticket.next;
            ticket[0] = next;
            if constexpr (kReadsAhead) {
                ticket[1] = own.tile.m_block;
                ticket[2] = own.tile.head;
                ticket[3] = own.tile.batch;
                ticket[4] = own.tile.split | own.tile.splits << 16;
                ticket[5] = own.tile.slot;
                ticket[6] = own.queries;
                ticket[7] = own.keys;
                ticket[8] = own.first_query;
                ticket[9] = own.first_key;
            }
            mbarrier_arrive(smem.ticket.bars.full[0]);
            state.advance();
        }
    }

    // Consumers: the tile after this one.
    __device__ __forceinline__ int next(SharedStorage<C>& smem, const FwdParams& params, int tile,
                                        bool elected) {
        if constexpr (kDynamic) {
            smem.ticket.bars.wait_full(state);
            const int* const ticket = smem.ticket.next;
            const int next = ticket[0];
            if constexpr (kReadsAhead) {
                const int part = ticket[4];
                own.tile = {{ticket[1], ticket[2], ticket[3]}, part & 0xffff, part >> 16, ticket[5]};
                own.queries = ticket[6];
                own.keys = ticket[7];
                own.first_query = ticket[8];
                own.first_key = ticket[9];
            }
            warp_sync();
            smem.ticket.bars.release(state, elected);
            state.advance();
            return next;
        }
        return C.scheduler == Scheduler::PerTile ? count(params) : tile + cta_count();
    }
};

// The last CTA to run out of tiles resets the counters for the next launch.
__device__ __forceinline__ void retire_counter(const FwdParams& params) {
    fence_gpu();
    if (atomic_add(&params.tile_counter[1], 1u) == cta_count() - 1) {
        params.tile_counter[0] = 0;
        params.tile_counter[1] = 0;
    }
}

template <Sm90FwdConfig C>
using VisibleKeys = Visibility<C.mask, C.varied>;

template <Sm90FwdConfig C>
__device__ __forceinline__ BlockRange tile_blocks(const VisibleKeys<C>& visible, const Rows<C.pack_gqa>& rows,
                                                  const WorkTile& tile) {
    const int first = tile.m_block * C.tile_m;
    const int last = min(first + C.tile_m, rows.count(visible.seqlen)) - 1;
    const BlockRange all = key_blocks<C.tile_n>(visible, rows.query(first), rows.query(last));
    if constexpr (C.split) return part_of(all, tile.split, tile.splits);
    return all;
}

// Of the tiles of keys that a work tile visits, those that its 64 rows from `first` on do: none right of
// their own diagonal. Tiles left of a window are visited by all rows.
template <Sm90FwdConfig C>
__device__ __forceinline__ BlockRange warpgroup_blocks(const VisibleKeys<C>& visible,
                                                       const Rows<C.pack_gqa>& rows, const WorkTile& tile,
                                                       const BlockRange& all, int first) {
    const int begin = tile.m_block * C.tile_m + first;
    const int last = min(begin + 64, rows.count(visible.seqlen)) - 1;
    BlockRange range = key_blocks<C.tile_n>(visible, rows.query(begin), rows.query(last));
    range.begin = all.begin;
    range.end = begin > last ? all.begin : min(range.end, all.end);
    // A part may lie right of the diagonal of some rows.
    if constexpr (C.split) range.end = max(range.end, all.begin);
    return range;
}

// ---- Producer: one thread issues all TMA loads; of pages, a warp ----------------------------------

template <Sm90FwdConfig C>
__device__ __forceinline__ void produce(SharedStorage<C>& smem, const FwdParams& params,
                                        const TensorMap& map_q, const TensorMap& map_k,
                                        const TensorMap& map_v) {
    using T = Traits<C>;
    PipelineState<C.q_stages> q_state;
    PipelineState<C.kv_stages> k_state, v_state;
    const int heads = C.pack_gqa ? params.shape.heads_kv : params.shape.heads_q;
    TileSource<C> tiles(params, cta_index(), heads);
    // Of a warp that loads pages, one lane does all else.
    const bool leads = !C.paged || lane_index() == 0;
    // Each CTA of a cluster loads a share of every K and V tile, to all of them.
    const int share = C.cluster_m > 1 ? cluster_cta_rank() : 0;

    int index = cta_index();
    while (index < tiles.count(params)) {
        const WorkTile tile = tiles.tile_of(params, index, heads);
        const auto seqlen = tiles.seqlen_of(params, tile);
        const BlockRange range =
            tile_blocks<C>(VisibleKeys<C>{params.shape, seqlen}, Rows<C.pack_gqa>(params.shape), tile);
        const int kv_head = C.pack_gqa ? tile.head : tile.head / params.shape.group_size;

        auto load_q = [&] {
            if (!leads) return;
            smem.q_bars.acquire(q_state, T::Q::kBytes);
            Mbarrier& full = smem.q_bars.full[q_state.stage];
            // Of packed heads, positions; of varied sequences, within the sequence.
            const int first =
                C.pack_gqa ? tile.m_block * (C.tile_m / params.shape.group_size) : tile.m_block * C.tile_m;
            const RaggedRows rows(params.varlen.tma_q, tile.batch, tile.head, seqlen.q_offset(), seqlen.q());
#pragma unroll
            for (int i = 0; i < T::Q::kPanels; ++i) {
                u8* dst = smem.q[q_state.stage] + i * T::Q::kPanelBytes;
                const int column = i * T::Q::kPanel;
                if constexpr (C.varied && C.pack_gqa) {
                    load_ragged_group(dst, map_q, full, column, rows, first, L2Policy::EvictFirst);
                } else if constexpr (C.varied) {
                    load_ragged(dst, map_q, full, column, rows, first, L2Policy::EvictFirst);
                } else if constexpr (C.pack_gqa) {
                    tma_load_5d(dst, map_q, full, column, 0, first, tile.head, tile.batch,
                                L2Policy::EvictFirst);
                } else {
                    tma_load_4d(dst, map_q, full, column, first, tile.head, tile.batch, L2Policy::EvictFirst);
                }
            }
            q_state.advance();
        };
        auto load_share = [&](auto tile_type, u8* dst, const TensorMap& map, Mbarrier& full, int n_block) {
            using Kv = decltype(tile_type);
            constexpr int kRows = C.tile_n / C.cluster_m;
#pragma unroll
            for (int i = 0; i < Kv::kPanels; ++i) {
                u8* panel = dst + i * Kv::kPanelBytes + Kv::row_offset(kRows) * share;
                const int key = n_block * C.tile_n + kRows * share;
                if constexpr (C.cluster_m == 1) {
                    tma_load_4d(panel, map, full, i * Kv::kPanel, key, kv_head, tile.batch,
                                L2Policy::EvictLast);
                } else {
                    tma_load_4d_multicast(panel, map, full, i * Kv::kPanel, key, kv_head, tile.batch,
                                          L2Policy::EvictLast, (1 << C.cluster_m) - 1);
                }
            }
        };
        // Keys of sequences that start anywhere, or lie in pages.
        auto load_varied = [&](auto tile_type, u8* dst, const TensorMap& map, const TmaStrides& strides,
                               auto& bars, auto& state, int n_block) {
            using Kv = decltype(tile_type);
            Mbarrier& full = bars.full[state.stage];
            if constexpr (C.paged) {
                const PagedKeys<C.tile_n> keys{
                    params.varlen, params.varlen.page_table + i64(tile.batch) * params.varlen.table_stride,
                    seqlen.k(), kv_head, lane_index()};
                // The page's number is on its way while the stage is waited for.
                const int row = lane_index() * params.varlen.page_part;
                const int page = row < C.tile_n ? keys.page_of(n_block * C.tile_n + row) : -1;
                bars.wait_empty(state);
                // The phase ends only after all lanes have seen the one before end. Boxes may come before
                // they are announced.
                warp_sync();
                if (leads) bars.announce(state, Kv::kBytes);
                keys.template load<Kv>(dst, map, strides, full, n_block, page);
            } else {
                bars.acquire(state, Kv::kBytes);
                const RaggedRows rows(strides, tile.batch, kv_head, seqlen.k_offset(), seqlen.k());
#pragma unroll
                for (int i = 0; i < Kv::kPanels; ++i) {
                    load_ragged(dst + i * Kv::kPanelBytes, map, full, i * Kv::kPanel, rows,
                                n_block * C.tile_n, L2Policy::EvictLast);
                }
            }
            state.advance();
        };
        auto load_k = [&](int n_block) {
            if constexpr (C.varied) {
                load_varied(typename T::K{}, smem.k[k_state.stage], map_k, params.varlen.tma_k, smem.k_bars,
                            k_state, n_block);
            } else {
                smem.k_bars.acquire(k_state, T::K::kBytes);
                load_share(typename T::K{}, smem.k[k_state.stage], map_k, smem.k_bars.full[k_state.stage],
                           n_block);
                k_state.advance();
            }
        };
        auto load_v = [&](int n_block) {
            if constexpr (C.varied) {
                load_varied(typename T::V{}, smem.v[v_state.stage], map_v, params.varlen.tma_v, smem.v_bars,
                            v_state, n_block);
            } else {
                smem.v_bars.acquire(v_state, T::V::kBytes);
                load_share(typename T::V{}, smem.v[v_state.stage], map_v, smem.v_bars.full[v_state.stage],
                           n_block);
                v_state.advance();
            }
        };
        auto draw = [&] {
            if constexpr (C.paged && C.scheduler == Scheduler::Dynamic) {
                return shuffle_from(leads ? tiles.draw(params, index) : 0, 0);
            } else {
                return tiles.draw(params, index);
            }
        };

        int next;
        if (!range.empty()) {
            // A second Q buffer is free before the next K stage is; a single one is not.
            if constexpr (C.q_stages > 1) load_q();
            load_k(range.end - 1);
            if constexpr (C.q_stages == 1) load_q();
#pragma unroll 1
            for (int n_block = range.end - 1; n_block > range.begin; --n_block) {
                load_k(n_block - 1);
                load_v(n_block);
            }
            next = draw();
            load_v(range.begin);
        } else {
            next = draw();
        }
        tiles.read(params, next, heads);
        if (leads) tiles.publish(smem, next);
        index = next;
    }
    if constexpr (C.scheduler == Scheduler::Dynamic) {
        if (leads) retire_counter(params);
    }
}

// ---- Consumers: 64 rows each --------------------------------------------------------------------

template <Sm90FwdConfig C>
__device__ __forceinline__ void consume(SharedStorage<C>& smem, const FwdParams& params, int wg) {
    using T = Traits<C>;
    const bool elected = elect_one();
    const int warp = warp_index() % 4;
    const int lane = lane_index();
    const int heads = C.pack_gqa ? params.shape.heads_kv : params.shape.heads_q;
    // The thread's first accumulator row within the work tile, and its first column within a tile of keys.
    const int own_row = 64 * wg + 16 * warp + lane / 4;
    const int own_column = 2 * (lane % 4);

    const Descriptor desc_q =
        descriptor_k_major<typename T::Q>(smem_address(smem.q[0]) + T::Q::row_offset(64 * wg));
    const Descriptor desc_k = descriptor_k_major<typename T::K>(smem_address(smem.k[0]));
    const Descriptor desc_v = descriptor_mn_major<typename T::V>(smem_address(smem.v[0]));
    u32 address_p = 0;
    if constexpr (!C.pv_is_rs) address_p = smem_address(smem.p.tiles[wg]);
    const Descriptor desc_p = descriptor_k_major<typename T::P>(address_p);

    PipelineState<C.q_stages> q_state;
    PipelineState<C.kv_stages> k_state, v_state;
    TileSource<C> tiles(params, cta_index(), heads);
    const ScoreMod<C.softcap> score_mod{params.score};
    // With ALiBi the scores are exponents already.
    const float to_log2 = score_mod.to_log2();
    const float scale_log2 = C.alibi ? 1.f : to_log2;

    // Ping-pong: warpgroups take turns at issuing products. Warpgroup i waits at barrier 1 + i, then signals
    // the next one.
    auto wait_turn = [&] {
        if constexpr (C.ping_pong) named_barrier_sync(1 + wg, 256);
    };
    auto signal_next = [&] {
        if constexpr (C.ping_pong) named_barrier_arrive(1 + (wg + 1 == C.num_wg ? 0 : wg + 1), 256);
    };
    if (C.ping_pong && wg == C.num_wg - 1) signal_next();

    float s[C.tile_n / 2];
    float o[C.head_dim_v / 2];
    u32 p[C.pv_is_rs ? C.tile_n / 4 : 1];
    float rescale[2];

    // S = Q K^T for the current K stage, as one wgmma group.
    auto issue_s = [&] {
        const Descriptor a = desc_q.recomputed();
        const Descriptor b = desc_k.recomputed();
        const u32 q_stage = q_state.stage * T::Q::kBytes;
        const u32 stage = k_state.stage * T::K::kBytes;
        wgmma::fence();
#pragma unroll
        for (int k = 0; k < C.head_dim; k += 16) {
            T::MmaS::template ss<0, 0>(s, a.at(q_stage + T::Q::column_offset(k)),
                                       b.at(stage + T::K::column_offset(k)), k != 0);
        }
        wgmma::commit();
    };
    // O += P V for the current V stage, as one wgmma group.
    auto issue_pv = [&](bool accumulate) {
        const Descriptor b = desc_v.recomputed();
        const u32 stage = v_state.stage * T::V::kBytes;
        wgmma::fence();
#pragma unroll
        for (int k = 0; k < C.tile_n; k += 16) {
            const u64 step = b.at(stage + T::V::row_offset(k));
            if constexpr (C.pv_is_rs) {
                T::MmaO::template rs<1>(o, p + k / 4, step, k != 0 || accumulate);
            } else {
                T::MmaO::template ss<0, 1>(o, desc_p.at(T::P::column_offset(k)), step, k != 0 || accumulate);
            }
        }
        wgmma::commit();
    };
    // P as the A operand of P V: packed in registers, where S has A's order already (PTX ISA, wgmma
    // fragments), or in shared memory.
    auto pack_p = [&] {
        if constexpr (C.pv_is_rs) {
#pragma unroll
            for (int i = 0; i < C.tile_n / 4; ++i) p[i] = pack<C.dtype>(s[2 * i], s[2 * i + 1]);
        } else {
            store_accumulator_tile<C.dtype, typename T::P>(address_p, s, warp, lane);
            fence_async_shared();
            warp_sync();
        }
    };
    auto release_k = [&] {
        smem.k_bars.release(k_state, elected);
        k_state.advance();
    };
    auto release_v = [&] {
        smem.v_bars.release(v_state, elected);
        v_state.advance();
    };

    // Skipped tiles are released unread, and their turns go to the next warpgroup. No product keeps the lanes
    // together: one that releases before another has seen the tile lets the stage be filled again, and the
    // other waits for a phase that has passed.
    auto skip_k = [&] {
        smem.k_bars.wait_full(k_state);
        warp_sync();
        release_k();
    };
    auto skip_v = [&] {
        smem.v_bars.wait_full(v_state);
        warp_sync();
        release_v();
    };
    auto skip_turn = [&] {
        wait_turn();
        signal_next();
    };

    // Holds the exponentials before what follows. The assembler would move the wait for a running product up
    // to the start of the softmax, which the product is meant to hide; it cannot move it across a branch on
    // the sums (never taken: P is not negative).
    auto hold = [&](const float(&sum)[2]) {
        if (sum[0] + sum[1] < 0.f) pause();
    };

    int index = cta_index();
    while (index < tiles.count(params)) {
        const WorkTile tile = tiles.tile_of(params, index, heads);
        const auto seqlen = tiles.seqlen_of(params, tile);
        const VisibleKeys<C> visible{params.shape, seqlen};
        const Rows<C.pack_gqa> rows(params.shape);
        const BlockRange all = tile_blocks<C>(visible, rows, tile);
        BlockRange range = all;
        if constexpr (T::kSkipsBlocks) range = warpgroup_blocks<C>(visible, rows, tile, all, 64 * wg);
        const int skipped = all.end - range.end;
        const int row = tile.m_block * C.tile_m + own_row;
        Softmax<C.exp_poly_of_16, T::kLazyMax ? 0 : C.rescale_threshold> softmax;

        const AlibiRows<C.alibi, C.mask, C.pack_gqa> alibi(params, seqlen, row, tile.head, tile.batch,
                                                           kLog2e);

        // Products to masked scores.
        auto modify = [&](int n_block) {
            score_mod.apply(s);
            alibi.apply(s, to_log2, n_block * C.tile_n + own_column);
            if (range.needs_mask(n_block)) {
                auto query_of = [&](int r) { return rows.query(row + 8 * r); };
                mask_tile(s, visible, query_of, n_block * C.tile_n + own_column);
            }
        };

        if (!range.empty()) {
            smem.q_bars.wait_full(q_state);
            if constexpr (T::kSkipsBlocks) {
#pragma unroll 1
                for (int i = 0; i < skipped; ++i) skip_k();
            }
            // The first tile of keys: nothing to rescale.
            int n_block = range.end - 1;
            smem.k_bars.wait_full(k_state);
            issue_s();
            wgmma::wait<0>();
            release_k();
            modify(n_block);
            softmax.template step<true>(s, scale_log2, rescale);
            pack_p();
            if constexpr (T::kSkipsBlocks) {
#pragma unroll 1
                for (int i = 0; i < skipped; ++i) {
                    skip_v();
                    skip_turn();
                }
            }

            bool accumulate = false;
            if constexpr (C.overlap_wg) {
                // The next S runs under this tile's P V, the softmax under both.
                constexpr bool kRescaleFirst = C.head_dim_v > 128;
                // P V is done by about the time that the maximum and the first exponentials are: waiting for
                // it there lets the other exponentials hide the conversion of P and the rescaling of O. (A
                // quarter, in steps of 8 registers; with three warpgroups no registers are left for more
                // than 8.)
                constexpr int kEarly = T::kLazyMax && C.num_wg == 3 ? 8 : max_of(8, C.tile_n / 2 / 4 / 8 * 8);
                while (--n_block >= range.begin) {
                    smem.k_bars.wait_full(k_state);
                    wait_turn();
                    issue_s();
                    if constexpr (kRescaleFirst && !T::kLazyMax) {
                        if (accumulate) scale_rows(o, rescale);
                    }
                    smem.v_bars.wait_full(v_state);
                    issue_pv(accumulate);
                    signal_next();
                    wgmma::wait<1>();
                    release_k();
                    modify(n_block);
                    if constexpr (T::kLazyMax) {
                        constexpr int kLate = C.tile_n / 2 - kEarly;
                        float early[kEarly], late[kLate];
                        float block_sum[2] = {0.f, 0.f};
                        softmax.exponentials_by_current_max(s, 0, scale_log2, early, block_sum);
                        hold(block_sum);
                        wgmma::wait<0>();
                        release_v();
                        softmax.exponentials_by_current_max(s, kEarly, scale_log2, late, block_sum);
                        // p is an operand of the running product until the wait: it is packed only now.
#pragma unroll
                        for (int i = 0; i < kEarly / 2; ++i)
                            p[i] = pack<C.dtype>(early[2 * i], early[2 * i + 1]);
#pragma unroll
                        for (int i = 0; i < kLate / 2; ++i)
                            p[kEarly / 2 + i] = pack<C.dtype>(late[2 * i], late[2 * i + 1]);
                        if (softmax.template outgrown<C.rescale_threshold>(block_sum)) {
                            softmax.template step<false>(s, scale_log2, rescale);
                            pack_p();
                            scale_rows(o, rescale);
                        } else {
                            softmax.sum[0] += block_sum[0];
                            softmax.sum[1] += block_sum[1];
                        }
                    } else {
                        softmax.template take_max<false>(s, scale_log2, rescale);
                        softmax.template exponentiate<kEarly>(s, 0, scale_log2);
                        hold(softmax.sum);
                        wgmma::wait<0>();
                        release_v();
                        softmax.template exponentiate<C.tile_n / 2 - kEarly>(s, kEarly, scale_log2);
                        pack_p();
                        if constexpr (!kRescaleFirst) scale_rows(o, rescale);
                    }
                    accumulate = true;
                }
                smem.q_bars.release(q_state, elected);
                if constexpr (kRescaleFirst && !T::kLazyMax) {
                    if (accumulate) scale_rows(o, rescale);
                }
                smem.v_bars.wait_full(v_state);
                issue_pv(accumulate);
            } else {
                // One product after the other; with ping-pong another warpgroup's products run under this
                // one's softmax.
                smem.v_bars.wait_full(v_state);
                issue_pv(false);
                while (--n_block >= range.begin) {
                    smem.k_bars.wait_full(k_state);
                    wait_turn();
                    issue_s();
                    signal_next();
                    wgmma::wait<0>();
                    release_k();
                    release_v();
                    modify(n_block);
                    softmax.template step<false>(s, scale_log2, rescale);
                    pack_p();
                    scale_rows(o, rescale);
                    smem.v_bars.wait_full(v_state);
                    issue_pv(true);
                }
                smem.q_bars.release(q_state, elected);
            }
            q_state.advance();
            float factor[2], lse[2];
            if (C.split && tile.splits > 1) {
                softmax.finish(factor, lse);
            } else {
                finish_rows<C.pack_gqa, C.sinks>(params, softmax, row, tile.head, factor, lse);
            }
            wgmma::wait<0>();
            release_v();
            if (C.split && tile.splits > 1) {
                store_partial<C.pack_gqa>(params, seqlen, o, factor, lse, row, own_row, tile, heads);
            } else {
                store_output<C.dtype, C.pack_gqa>(params, seqlen, o, factor, lse, row, tile.head, tile.batch);
            }
        } else {
            if constexpr (T::kSkipsBlocks) {
                if (skipped > 0) {
                    smem.q_bars.wait_full(q_state);
#pragma unroll 1
                    for (int i = 0; i < skipped; ++i) {
                        skip_k();
                        skip_v();
                        if (i > 0) skip_turn();
                    }
                    smem.q_bars.release(q_state, elected);
                    q_state.advance();
                }
            }
            if (C.split && tile.splits > 1) {
                store_nothing_partial<C.pack_gqa>(params, seqlen, row, own_row, tile, heads);
            } else {
                store_nothing_seen<C.pack_gqa, C.sinks>(params, seqlen, row, tile.head, tile.batch);
            }
        }
        index = tiles.next(smem, params, index, elected);
    }
}

// ---- Kernel -------------------------------------------------------------------------------------

}  // namespace fa::sm90

namespace fa {

template <Sm90FwdConfig C>
constexpr int sm90_fwd_smem_bytes = sizeof(sm90::SharedStorage<C>);

template <Sm90FwdConfig C>
__device__ __forceinline__ void sm90_fwd(const FwdParams& params, const TensorMap& map_q,
                                         const TensorMap& map_k, const TensorMap& map_v) {
    using T = sm90::Traits<C>;
    auto& smem = shared_memory<sm90::SharedStorage<C>>();

    const int warp = warp_index();
    if (warp == 0 && elect_one()) {
        tma_prefetch_map(map_q);
        tma_prefetch_map(map_k);
        tma_prefetch_map(map_v);
        smem.q_bars.init(T::kConsumerWarps);
        smem.k_bars.init(T::kConsumerWarps);
        smem.v_bars.init(T::kConsumerWarps);
        if constexpr (C.scheduler == Scheduler::Dynamic) smem.ticket.bars.init(T::kConsumerWarps);
        mbarrier_init_fence();
    }
    if constexpr (C.cluster_m > 1) {
        cluster_sync();
    } else {
        cta_sync();
    }

    if (warp < 4) {
        setmaxnreg_dec<T::kProducerRegs>();
        if (warp == 0 && (C.paged || elect_one())) sm90::produce<C>(smem, params, map_q, map_k, map_v);
    } else {
        setmaxnreg_inc<T::kConsumerRegs>();
        sm90::consume<C>(smem, params, warp / 4 - 1);
        // The other CTAs' consumers may still arrive at this CTA's barriers. (Exited warps count as arrived.)
        if constexpr (C.cluster_m > 1) cluster_sync();
    }
}

}  // namespace fa
