// Attention backward for SM80 and later, by cp.async and mma.sync: a CTA owns a tile of keys and visits the
// tiles of queries that see it. Its warps are two groups. The P warps compute P, one tile of queries ahead,
// and dV; the dS warps compute dS and dK; each group computes half of dQ. A warp then owns a larger part of
// each product, whose operands are read from shared memory less often, and the exponentials of one group run
// under the products of the other.
#pragma once
#include "attn/alibi.cuh"
#include "attn/bwd_dsinks.cuh"
#include "attn/bwd_epilogue.cuh"
#include "attn/bwd_postprocess.cuh"
#include "attn/bwd_preprocess.cuh"
#include "attn/bwd_tile.cuh"
#include "attn/mask.cuh"
#include "attn/query_range.cuh"
#include "attn/score_mod.cuh"
#include "attn/seqlen.cuh"
#include "attn/store_rows.cuh"
#include "attn/tensor_view.cuh"
#include "attn/visibility.cuh"
#include "config.cuh"
#include "params.cuh"
#include "ptx/address.cuh"
#include "ptx/atomic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "sm80/bwd_layout.cuh"
#include "tile/copy_tile.cuh"

namespace fa::sm80 {

// One tile of queries of one query head.
struct alignas(8) BwdStep {
    int head, m_block;

    __device__ __forceinline__ BwdStep next(const BlockRange& range) const {
        return m_block + 1 < range.end ? BwdStep{head, m_block + 1} : BwdStep{head + 1, range.begin};
    }
    __device__ __forceinline__ BwdStep previous(const BlockRange& range) const {
        return m_block > range.begin ? BwdStep{head, m_block - 1} : BwdStep{head - 1, range.end - 1};
    }
};

// ---- Shared memory ------------------------------------------------------------------------------

struct NoSeqlen {};

// The planner's account names the same buffers in the same order; the generated unit asserts the size.
template <Sm80BwdConfig C>
struct alignas(128) BwdStorage {
    using L = BwdLayout<C>;
    alignas(128) u8 q[C.q_stages][L::Q::kBytes];
    alignas(128) u8 dout[C.do_stages][L::Do::kBytes];
    alignas(128) u8 k[L::K::kBytes];
    alignas(128) u8 v[L::V::kBytes];
    // P, and with a soft cap P times the cap's slope.
    alignas(128) u8 p[C.softcap ? 2 : 1][L::Pds::kBytes];
    alignas(128) u8 ds[L::Pds::kBytes];
    // LSE in base 2 with each Q, dPsum with each dO.
    alignas(128) float lse[C.q_stages][C.tile_m];
    alignas(128) float dpsum[C.do_stages][C.tile_m];
    // The CTA's work: registers are scarcer than reads of shared memory.
    BwdTileOf<C.varied> tile;
    BlockRange range;
    BwdStep step[2];  // the current one of each group
    int descending;   // see descends(); kernels that can only
    [[no_unique_address]] Either<C.varied, Seqlen<true>, NoSeqlen> seqlen;
};

// ---- Barriers -----------------------------------------------------------------------------------

enum BwdBarrier : int {
    kBarrierBlock = 1,  // all threads: a step begins (0 is cta_sync)
    kBarrierPRead,      // all threads: P has been read and may be written again
    kBarrierDsRead,     // all threads: dS has been read and may be written again
    kBarrierDs,         // dS is written; with one dO buffer all threads: dO has been read
    kBarrierGroup,      // the threads of one group: this one the P warps, the next one the dS warps
};

// A thread's warp and lane in its group, computed again at each use: registers are scarcer than instructions.
template <int GroupWarps>
struct Place {
    int warp, lane;

    // `m_block` is not negative, which the compiler does not know: it cannot hoist this above the main loop.
    __device__ __forceinline__ explicit Place(int m_block = 0) {
        const int thread = thread_index_volatile() + (u32(m_block) >> 31);
        warp = thread / 32 % GroupWarps;
        lane = thread % 32;
    }
};

// ---- What both groups do ------------------------------------------------------------------------

template <Sm80BwdConfig C>
struct BwdGroup {
    using L = BwdLayout<C>;
    using CutS = typename L::CutS;
    using Stats = float[CutS::kFragments][2];  // of the thread's rows, [fragment][upper or lower half]
    using Here = Place<L::kGroupWarps>;

    BwdStorage<C>& smem;
    const BwdParams& params;
    const Visibility<C.mask, C.varied>& own_visible;
    const BwdTileOf<C.varied>& tile = smem.tile;
    const BlockRange& range = smem.range;

    // Warps with many fragments of A in S and dP have no registers for those of two contraction steps.
    static constexpr int kAheadA = CutS::kFragments > 2 ? 0 : 1;

    // ---- Copies ---------------------------------------------------------------------------------

    // The address of a buffer that all steps share, computed again wherever it is needed.
    __device__ __forceinline__ u32 buffer(const void* within) const {
        const u8* first = reinterpret_cast<const u8*>(&smem);
        return smem_address_volatile(first) + u32(static_cast<const u8*>(within) - first);
    }

    // Lengths that the parameters do not have are read from shared memory at each use.
    __device__ __forceinline__ int length(const int Seqlen<true>::* of) const {
        return int(load_shared_u32(buffer(&(smem.seqlen.*of))));
    }
    __device__ __forceinline__ int queries() const {
        if constexpr (C.varied) return length(&Seqlen<true>::queries);
        return own_visible.seqlen.q();
    }
    __device__ __forceinline__ int keys() const {
        if constexpr (C.varied) return length(&Seqlen<true>::keys);
        return own_visible.seqlen.k();
    }
    __device__ __forceinline__ int first_query() const {
        if constexpr (C.varied) return length(&Seqlen<true>::first_query);
        return 0;
    }
    __device__ __forceinline__ int first_key() const {
        if constexpr (C.varied) return length(&Seqlen<true>::first_key);
        return 0;
    }
    __device__ __forceinline__ decltype(auto) visible() const {
        if constexpr (C.varied) {
            return Visibility<C.mask, true>{params.shape, Seqlen<true>{queries(), keys(), 0, 0, 0, 0}};
        } else {
            return (own_visible);
        }
    }

    // Steps count the tiles of queries from the first to the last; this is the one that a step visits.
    __device__ __forceinline__ int block(int m_block) const {
        return query_block(range, descending(), m_block);
    }
    __device__ __forceinline__ bool descending() const {
        if constexpr (can_descend<C.mask, C.deterministic>()) return smem.descending;
        return false;
    }

    // The buffers of a step, from its number.
    __device__ __forceinline__ int number(BwdStep step) const {
        return (step.head - tile.first_head) * (range.end - range.begin) + step.m_block - range.begin;
    }
    __device__ __forceinline__ u32 q_stage(BwdStep step) const { return u32(number(step)) % C.q_stages; }
    __device__ __forceinline__ u32 do_stage(BwdStep step) const {
        return C.do_stages > 1 ? u32(number(step)) % C.do_stages : 0;
    }
    __device__ __forceinline__ u32 q_buffer(BwdStep step) const {
        return smem_address(smem.q) + q_stage(step) * L::Q::kBytes;
    }
    __device__ __forceinline__ u32 do_buffer(BwdStep step) const {
        return C.do_stages > 1 ? smem_address(smem.dout) + do_stage(step) * L::Do::kBytes : buffer(smem.dout);
    }
    __device__ __forceinline__ u32 lse_buffer(BwdStep step) const {
        return smem_address(smem.lse) + q_stage(step) * (4 * C.tile_m);
    }
    __device__ __forceinline__ u32 dpsum_buffer(BwdStep step) const {
        return C.do_stages > 1 ? smem_address(smem.dpsum) + do_stage(step) * (4 * C.tile_m)
                               : buffer(smem.dpsum);
    }
    __device__ __forceinline__ bool exists(BwdStep step) const { return step.head < tile.end_head; }

    template <class Tile, int Threads, int FirstThread>
    __device__ __forceinline__ static void load(u32 to, const ConstTensor& tensor, int batch, int head,
                                                int row, int end, int columns) {
        const u16* from = view(tensor).row(batch, 0, head);
        TileCopy<Tile, Threads, FirstThread>{from, tensor.strides.seq, columns}.template start<true>(to, row,
                                                                                                     end);
    }
    // Statistics of a tile of queries, which exist beyond the end of the sequence.
    template <int FirstThread>
    __device__ __forceinline__ void load_stats(u32 to, const float* stats, BwdStep step) const {
        const int thread = thread_index_volatile() - FirstThread;
        static_assert(C.tile_m / 4 <= L::kGroupThreads);
        if (thread >= C.tile_m / 4) return;
        const float* from = stats + dq_tile(params, tile, step.head, block(step.m_block)) * C.tile_m;
        cp_async_16(to + 16 * thread, from + 4 * thread, 16);
    }
    template <int Threads, int FirstThread>
    __device__ __forceinline__ void load_q(BwdStep step) const {
        load<typename L::Q, Threads, FirstThread>(q_buffer(step), params.q, tile.batch, step.head,
                                                  first_query() + block(step.m_block) * C.tile_m,
                                                  first_query() + queries(), params.shape.head_dim);
        load_stats<FirstThread>(lse_buffer(step), params.lse_log2, step);
    }
    template <int Threads, int FirstThread>
    __device__ __forceinline__ void load_do(BwdStep step) const {
        load<typename L::Do, Threads, FirstThread>(do_buffer(step), params.dout, tile.batch, step.head,
                                                   first_query() + block(step.m_block) * C.tile_m,
                                                   first_query() + queries(), params.shape.head_dim_v);
        load_stats<FirstThread>(dpsum_buffer(step), params.dpsum, step);
    }

    // K, V and the first tiles of queries, by all threads.
    __device__ __forceinline__ void load_first(BwdStep first) const {
        const int key = first_key() + tile.n_block * C.tile_n, end = first_key() + keys();
        load<typename L::K, L::kThreads, 0>(this->buffer(smem.k), params.k, tile.batch, tile.kv_head, key,
                                            end, params.shape.head_dim);
        load<typename L::V, L::kThreads, 0>(this->buffer(smem.v), params.v, tile.batch, tile.kv_head, key,
                                            end, params.shape.head_dim_v);
        load_q<L::kThreads, 0>(first);
        load_do<L::kThreads, 0>(first);
        const BwdStep second = first.next(range);
        if (exists(second)) load_q<L::kThreads, 0>(second);
        cp_async_commit();
        step_barrier();
    }

    // The thread's copies are in; past the barrier all are, and what was read before may be overwritten.
    __device__ __forceinline__ void step_barrier() const {
        cp_async_wait<0>();
        named_barrier_sync_unaligned(kBarrierBlock, L::kThreads);
    }

    // The current step of group `group`.
    __device__ __forceinline__ BwdStep at(int group) const {
        u32 head, m_block;
        load_shared_u32x2(head, m_block, buffer(smem.step + group));
        return {int(head), int(m_block)};
    }
    // Ends a step of group `group`; returns whether there is another.
    __device__ __forceinline__ bool advance(int group) const {
        step_barrier();
        if (thread_index() == group * L::kGroupThreads) smem.step[group] = at(group).next(range);
        named_barrier_sync(kBarrierGroup + group, L::kGroupThreads);
        return exists(at(group));
    }

    // ---- Pieces of a step -----------------------------------------------------------------------

    __device__ __forceinline__ void read_stats(Stats& of, u32 stats, BwdStep step) const {
        const Here place(step.m_block);
        const u32 rows = stats + 4 * (CutS::first_m(place.warp) + place.lane / 4);
#pragma unroll
        for (int f = 0; f < CutS::kFragments; ++f) {
            of[f][0] = load_shared_f32(rows + 4 * 16 * f);
            of[f][1] = load_shared_f32(rows + 4 * (16 * f + 8));
        }
    }

    // D += A B, cut among the group's warps.
    template <class Cut, class A, class B, int Contraction, int AheadA, int AheadB,
              class Interleave = NoInterleave>
    __device__ __forceinline__ static void multiply(typename Cut::Accumulators& d, u32 a, u32 b, int m_block,
                                                    int first = 0, const Interleave& interleave = {}) {
        const Here place(m_block);
        warp_multiply<C.dtype, Contraction / 16, AheadA, AheadB>(
            d, A(Cut::first_m(place.warp), place.lane), a, B(first + Cut::first_n(place.warp), place.lane), b,
            interleave);
    }

    // ---- A group's part of dQ -------------------------------------------------------------------

    static constexpr int kDqParts = dq_turns<C>();

    template <int Group>
    __device__ __forceinline__ void multiply_dq(typename L::template CutDq<Group>::Accumulators& dq,
                                                int m_block) const {
        using Cut = typename L::template CutDq<Group>;
        Cut::clear(dq);
        multiply<Cut, typename L::template DsOfDq<Group>, typename L::template KOfDq<Group>, C.tile_n, 1, 2>(
            dq, this->buffer(smem.ds), this->buffer(smem.k), m_block, Group * L::kDqFirst);
    }

    // Adds it to its accumulator bit by bit between the rounds of another product: at once, it would block
    // the load and store units.
    template <int Group>
    struct DqAdder {
        using Cut = typename L::template CutDq<Group>;
        float* to;
        const typename Cut::Accumulators& dq;

        template <int Rounds>
        __device__ __forceinline__ void round(int number) const {
#pragma unroll
            for (int part = number * Cut::kParts / Rounds; part < (number + 1) * Cut::kParts / Rounds; ++part)
                Cut::add_part(to, dq, part);
        }
    };
    template <int Group>
    __device__ __forceinline__ DqAdder<Group> dq_adder(
        const typename L::template CutDq<Group>::Accumulators& dq, BwdStep step) const {
        const i64 index = dq_tile(params, tile, step.head, block(step.m_block));
        const Here place(step.m_block);
        float* accum = params.dq_accum + index * (C.tile_m * C.head_dim) + C.tile_m * Group * L::kDqFirst;
        return {L::template CutDq<Group>::place(accum, place.warp, place.lane), dq};
    }

    // Deterministic tiles add in turn; each group has turns of its own, for its part.
    __device__ __forceinline__ void await_turn(BwdStep step, int group) const {
        if constexpr (C.deterministic) {
            if (thread_index() == group * L::kGroupThreads)
                wait_for_turn<C.tile_m, C.tile_n, kDqParts>(params, visible(), tile, descending(), step.head,
                                                            block(step.m_block), 1, group % kDqParts);
            named_barrier_sync(kBarrierGroup + group, L::kGroupThreads);
        }
    }
    // Half a step after the additions, when the L2 has made them: the release waits for that. It is one
    // thread's, for the whole group.
    __device__ __forceinline__ void end_turn(BwdStep step, int group) const {
        if constexpr (C.deterministic) {
            named_barrier_sync(kBarrierGroup + group, L::kGroupThreads);
            if (thread_index() == group * L::kGroupThreads)
                red_release_increment(
                    dq_semaphore<kDqParts>(params, tile, step.head, block(step.m_block), group % kDqParts));
        }
    }

    // ---- P and dS in shared memory --------------------------------------------------------------

    // Where registers i to i + 3 of a fragment of S or dP lie in the tile of P or dS at `address`, rounded: a
    // word of fragment 0's upper half; its lower half and the other fragments follow. Eight rows of four
    // words at a time, which the swizzle spreads over all banks.
    static constexpr u32 kFragmentBytes = 16 * L::Pds::kRowBytes, kLowerBytes = 8 * L::Pds::kRowBytes;
    __device__ __forceinline__ static u32 words_at(u32 address, int i, const Here& place) {
        using Tile = typename L::Pds;
        const int row = CutS::first_m(place.warp) + place.lane / 4;
        const int column = CutS::first_n(place.warp) + 2 * i;
        return address + row * Tile::kRowBytes + place.lane % 4 * 4 + Tile::panel_offset(column) +
               ((Tile::chunk(column) ^ Tile::twist(row)) << 4);
    }

    // Stores a warp's share of the gradient of group `group`, or adds it to its accumulator, where
    // deterministic parts of a K/V head's query heads take turns.
    template <class Cut>
    __device__ __forceinline__ void finish(const typename Cut::Accumulators& d, int group, float* accum,
                                           const MutTensor& gradient, int tile_columns, int columns,
                                           float factor) const {
        const Here place;
        if (params.head_splits > 1) {
            const i64 index = dkv_tile(params, tile);
            if constexpr (C.deterministic) {
                if (thread_index() == group * L::kGroupThreads)
                    wait_for_parts(dkv_semaphore(params, tile, group), tile.split);
                named_barrier_sync(kBarrierGroup + group, L::kGroupThreads);
            }
            Cut::add(accum + index * (C.tile_n * tile_columns), d, place.warp, place.lane);
            if constexpr (C.deterministic) {
                fence_gpu();
                named_barrier_sync(kBarrierGroup + group, L::kGroupThreads);
                if (thread_index() == group * L::kGroupThreads)
                    count_part(dkv_semaphore(params, tile, group));
            }
            return;
        }
        const int first = tile.n_block * C.tile_n;
        u16* out = view(gradient).row(tile.batch, first_key() + first, tile.kv_head);
#pragma unroll
        for (int f = 0; f < Cut::kFragments; ++f) {
            const int row = Cut::first_m(place.warp) + 16 * f + place.lane / 4;
            const int left = keys() - first;
            store_fragment_row<C.dtype>(0, out + row * gradient.strides.seq, row < left, d[f], factor,
                                        Cut::first_n(place.warp), columns);
            store_fragment_row<C.dtype>(1, out + (row + 8) * gradient.strides.seq, row + 8 < left, d[f],
                                        factor, Cut::first_n(place.warp), columns);
        }
    }
};

// ---- P warps: P = exp(S - LSE) and dV -----------------------------------------------------------

template <Sm80BwdConfig C>
struct PWarps : BwdGroup<C> {
    using Base = BwdGroup<C>;
    using L = BwdLayout<C>;
    using CutS = typename L::CutS;
    using CutDv = typename L::CutDv;
    using CutDq = typename L::template CutDq<0>;
    using Base::params, Base::range, Base::smem, Base::tile;
    using typename Base::Here;
    using typename Base::Stats;

    // P in the form in which it is kept until it is stored. With a soft cap: P, and P times the cap's slope 1
    // - share^2, rounded each. The dS warps could not recover the slope from the rounded P: where the cap
    // saturates, the slope is far below that rounding. The share of a hidden score is -inf, its P 0.
    __device__ __forceinline__ static float kept(float p, float share) {
        if constexpr (!C.softcap) return p;
        return float_of_bits(pack<C.dtype>(p, p * ScoreMod<C.softcap>::slope(share)));
    }
    __device__ __forceinline__ static void store_kept(u32 at, float first, float second) {
        if constexpr (C.softcap) {
            const u32 a = bits_of_float(first), b = bits_of_float(second);
            store_shared_u32(at, (a & 0xffff) | b << 16);
            store_shared_u32(at + L::Pds::kBytes, a >> 16 | (b & 0xffff0000));
        } else {
            store_shared_u32(at, pack<C.dtype>(first, second));
        }
    }

    // P of a step.
    __device__ __forceinline__ void probabilities(typename CutS::Accumulators& s, BwdStep step) const {
        float slope = 0.f;
        if constexpr (C.alibi) slope = kLog2e * alibi_slope(params.mods, tile.batch, step.head);
        CutS::clear(s);
        Base::template multiply<CutS, typename L::QOfS, typename L::KOfS, C.head_dim, Base::kAheadA, 2>(
            s, this->q_buffer(step), this->buffer(smem.k), step.m_block);
        Stats lse;
        this->read_stats(lse, this->lse_buffer(step), step);
        const Here place(step.m_block);
        const bool masked = range.needs_mask(this->block(step.m_block));
        const ScoreMod<C.softcap> score_mod{params.score};
        const float scale_log2 = score_mod.shares_to_log2();
#pragma unroll
        for (int f = 0; f < CutS::kFragments; ++f) {
            score_mod.apply_as_shares(s[f]);
            if (masked) {
                auto query_of = [&](int r) {
                    return this->block(step.m_block) * C.tile_m + CutS::first_m(place.warp) + 16 * f + 8 * r +
                           place.lane / 4;
                };
                const int first_key =
                    tile.n_block * C.tile_n + CutS::first_n(place.warp) + 2 * (place.lane % 4);
                mask_tile(s[f], this->visible(), query_of, first_key);
            }
            if constexpr (C.alibi) {
                float bias[CutS::kRegisters] = {};
                const int query = this->block(step.m_block) * C.tile_m + CutS::first_m(place.warp) + 16 * f +
                                  place.lane / 4;
                const int diagonal = query + this->keys() - this->queries();
                add_alibi<C.mask>(bias, 0.f, {slope, slope}, {diagonal, diagonal + 8},
                                  tile.n_block * C.tile_n + CutS::first_n(place.warp) + 2 * (place.lane % 4));
#pragma unroll
                for (int i = 0; i < CutS::kRegisters; ++i) {
                    const float exponent = fmaf(s[f][i], scale_log2, bias[i] - lse[f][i >> 1 & 1]);
                    s[f][i] = kept(exp2_approx(exponent), s[f][i]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < CutS::kRegisters; ++i) {
                    s[f][i] = kept(exp2_approx(fmaf(s[f][i], scale_log2, -lse[f][i >> 1 & 1])), s[f][i]);
                }
            }
        }
    }

    __device__ __forceinline__ void store(const typename CutS::Accumulators& p, int m_block) const {
        const Here place(m_block);
#pragma unroll
        for (int i = 0; i < CutS::kRegisters; i += 4) {
            const u32 at = Base::words_at(this->buffer(smem.p), i, place);
#pragma unroll
            for (int f = 0; f < CutS::kFragments; ++f) {
                store_kept(at + f * Base::kFragmentBytes, p[f][i], p[f][i + 1]);
                store_kept(at + f * Base::kFragmentBytes + Base::kLowerBytes, p[f][i + 2], p[f][i + 3]);
            }
        }
    }

    // Starts the copies of what follows `step`: with three Q buffers the Q after the next one.
    __device__ __forceinline__ void load_ahead(BwdStep step) const {
        const BwdStep next = step.next(range);
        if constexpr (C.q_stages > 2) {
            const BwdStep after = next.next(range);
            if (this->exists(after)) this->template load_q<L::kGroupThreads, 0>(after);
        } else {
            if (this->number(step) > 0 && this->exists(next))
                this->template load_q<L::kGroupThreads, 0>(next);
        }
        if constexpr (C.do_stages > 1) {
            if (this->exists(next)) this->template load_do<L::kGroupThreads, 0>(next);
        }
        cp_async_commit();
    }

    template <class Interleave>
    __device__ __forceinline__ void multiply_dv(typename CutDv::Accumulators& dv, BwdStep step,
                                                const Interleave& interleave) const {
        Base::template multiply<CutDv, typename L::POfDv, typename L::DoOfDv, C.tile_m, 1, 2>(
            dv, this->buffer(smem.p), this->do_buffer(step), step.m_block, 0, interleave);
    }

    __device__ __forceinline__ void main_loop() const {
        auto step = [this] { return this->at(0); };
        typename CutDv::Accumulators dv;
        CutDv::clear(dv);
        {
            typename CutS::Accumulators s;
            probabilities(s, step());
            store(s, step().m_block);
        }
        this->step_barrier();
        do {
            load_ahead(step());
            if constexpr (L::kDqFirst > 0) {
                // dQ of the step before this one; in the first step zeros are added.
                typename CutDq::Accumulators dq;
                const bool first = this->number(step()) == 0;
                if (first) {
                    CutDq::clear(dq);
                } else {
                    this->template multiply_dq<0>(dq, step().m_block);
                }
                named_barrier_arrive(kBarrierDsRead, L::kThreads);
                const BwdStep before = first ? step() : step().previous(range);
                if (!first) this->await_turn(before, 0);
                multiply_dv(dv, step(), this->template dq_adder<0>(dq, before));
            } else {
                multiply_dv(dv, step(), NoInterleave{});
            }
            if constexpr (C.do_stages == 1) named_barrier_arrive(kBarrierDs, L::kThreads);
            if (this->exists(step().next(range))) {
                if constexpr (C.q_stages == 2) {
                    cp_async_wait<0>();
                    named_barrier_sync(kBarrierGroup, L::kGroupThreads);
                }
                const BwdStep next = step().next(range);
                typename CutS::Accumulators s;
                probabilities(s, next);
                named_barrier_sync(kBarrierPRead, L::kThreads);
                store(s, next.m_block);
            } else {
                named_barrier_sync(kBarrierPRead, L::kThreads);
            }
            if constexpr (C.deterministic && L::kDqFirst > 0) {
                if (this->number(step()) > 0) this->end_turn(step().previous(range), 0);
            }
        } while (this->advance(0));
        if constexpr (L::kDqFirst > 0) {
            const BwdStep before = step().previous(range);
            typename CutDq::Accumulators dq;
            this->template multiply_dq<0>(dq, before.m_block);
            this->await_turn(before, 0);
            this->template dq_adder<0>(dq, before).template round<1>(0);
            this->end_turn(before, 0);
        }
        this->template finish<CutDv>(dv, 0, params.dv_accum, params.dv, C.head_dim_v, params.shape.head_dim_v,
                                     1.f);
    }
};

// ---- dS warps: dS = P (dP - dPsum) and dK -------------------------------------------------------

template <Sm80BwdConfig C>
struct DsWarps : BwdGroup<C> {
    using Base = BwdGroup<C>;
    using L = BwdLayout<C>;
    using CutS = typename L::CutS;
    using CutDk = typename L::CutDk;
    using CutDq = typename L::template CutDq<1>;
    using Base::params, Base::range, Base::smem, Base::tile;
    using typename Base::Here;
    using typename Base::Stats;
    static constexpr int kFirstThread = L::kGroupThreads;

    // dS from dP - dPsum and P, which the same thread of the P warps has written; both are rounded.
    __device__ __forceinline__ void differentiate(const typename CutS::Accumulators& dp, BwdStep step) const {
        const Here place(step.m_block);
        constexpr int kRounds = CutS::kRegisters / 4;
        u32 p[CutS::kFragments][2];
        constexpr u32 kDsFromP = L::Pds::kBytes;  // ds follows p in BwdStorage
        const u32 of_p = this->buffer(smem.p[C.softcap]);
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            const u32 at = Base::words_at(of_p, 4 * round, place);
#pragma unroll
            for (int f = 0; f < CutS::kFragments; ++f) {
                p[f][0] = load_shared_u32(at + f * Base::kFragmentBytes);
                p[f][1] = load_shared_u32(at + f * Base::kFragmentBytes + Base::kLowerBytes);
            }
#pragma unroll
            for (int f = 0; f < CutS::kFragments; ++f) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const u32 pair = p[f][r];
                    const float* of = dp[f] + 4 * round + 2 * r;
                    const float low = unpack_low<C.dtype>(pair) * of[0],
                                high = unpack_high<C.dtype>(pair) * of[1];
                    store_shared_u32(at + kDsFromP + f * Base::kFragmentBytes + r * Base::kLowerBytes,
                                     pack<C.dtype>(low, high));
                }
            }
        }
    }

    __device__ __forceinline__ void main_loop() const {
        auto step = [this] { return this->at(1); };
        typename CutDk::Accumulators dk;
        CutDk::clear(dk);
        this->step_barrier();
        do {
            {
                typename CutS::Accumulators dp;
                Stats dpsum;
                this->read_stats(dpsum, this->dpsum_buffer(step()), step());
#pragma unroll
                for (int f = 0; f < CutS::kFragments; ++f) {
#pragma unroll
                    for (int i = 0; i < CutS::kRegisters; ++i) dp[f][i] = -dpsum[f][i >> 1 & 1];
                }
                Base::template multiply<CutS, typename L::DoOfDp, typename L::VOfDp, C.head_dim_v,
                                        Base::kAheadA, 2>(dp, this->do_buffer(step()), this->buffer(smem.v),
                                                          step().m_block);
                if constexpr (L::kDqFirst > 0) named_barrier_sync(kBarrierDsRead, L::kThreads);
                differentiate(dp, step());
            }
            named_barrier_sync(kBarrierDs, C.do_stages == 1 ? L::kThreads : L::kGroupThreads);
            // Not where P has been read: racecheck takes a thread's reads as finished when it has waited, not
            // when it arrives.
            named_barrier_arrive(kBarrierPRead, L::kThreads);
            if constexpr (C.do_stages == 1) {
                const BwdStep next = step().next(range);
                if (this->exists(next)) this->template load_do<L::kGroupThreads, kFirstThread>(next);
                cp_async_commit();
            }
            if constexpr (C.deterministic) {
                if (this->number(step()) > 0) this->end_turn(step().previous(range), 1);
            }
            typename CutDq::Accumulators dq;
            this->template multiply_dq<1>(dq, step().m_block);
            this->await_turn(step(), 1);
            Base::template multiply<CutDk, typename L::DsOfDk, typename L::QOfDk, C.tile_m, 1, 2>(
                dk, this->buffer(smem.ds), this->q_buffer(step()), step().m_block, 0,
                this->template dq_adder<1>(dq, step()));
        } while (this->advance(1));
        if constexpr (C.deterministic) this->end_turn(step().previous(range), 1);
        this->template finish<CutDk>(dk, 1, params.dk_accum, params.dk, C.head_dim, params.shape.head_dim,
                                     params.score.scale);
    }
};

}  // namespace fa::sm80

// ---- Kernel -------------------------------------------------------------------------------------

namespace fa {

template <Sm80BwdConfig C>
constexpr int sm80_bwd_smem_bytes = sizeof(sm80::BwdStorage<C>);

template <Sm80BwdConfig C>
__device__ __forceinline__ void sm80_bwd(const BwdParams& params) {
    auto& smem = shared_memory<sm80::BwdStorage<C>>();
    using Visible = Visibility<C.mask, C.varied>;
    if (thread_index() == 0) {
        // Deterministic tiles are drawn: a tile waits only for tiles drawn before it, which are running.
        const int index = C.deterministic ? atomic_add(params.tile_counter, 1u) : cta_index();
        if (C.varied && index >= bwd_blocks<C.varied>(params) * params.plan.heads) {
            smem.tile.n_block = -1;
        } else {
            smem.tile = bwd_tile_at<C.mask, C.tile_order, C.deterministic, C.varied>(params, index);
            const auto seqlen = Seqlen<C.varied>::of(params, smem.tile.batch);
            if constexpr (C.varied) {
                smem.tile.queries = WorkspacePlace::of_queries<C.tile_m>(params, seqlen, smem.tile.batch);
                smem.tile.keys = WorkspacePlace::of_keys<C.tile_n>(params, seqlen, smem.tile.batch);
                smem.seqlen = seqlen;
            }
            smem.range =
                query_blocks<C.tile_m, C.tile_n>(Visible{params.shape, seqlen}, smem.tile.n_block * C.tile_n);
            if constexpr (can_descend<C.mask, C.deterministic>())
                smem.descending = descends<C.mask, C.deterministic, C.varied>(params, smem.tile);
            for (sm80::BwdStep& step : smem.step) step = {smem.tile.first_head, smem.range.begin};
        }
    }
    cta_sync();
    if (C.varied && smem.tile.n_block < 0) return;
    const auto seqlen = Seqlen<C.varied>::of(params, smem.tile.batch);
    const Visible visible{params.shape, seqlen};
    if (smem.range.empty() || smem.tile.first_head >= smem.tile.end_head) {
        store_zero_gradients(params, seqlen, smem.tile, C.tile_n, thread_index(), cta_threads());
        return;
    }
    sm80::BwdGroup<C>{smem, params, visible}.load_first({smem.tile.first_head, smem.range.begin});
    if (thread_index() < sm80::BwdLayout<C>::kGroupThreads) {
        sm80::PWarps<C>{{smem, params, visible}}.main_loop();
    } else {
        sm80::DsWarps<C>{{smem, params, visible}}.main_loop();
    }
}

}  // namespace fa
