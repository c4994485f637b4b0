// The code that both warp groups of the SM80-class backward share: copies, products, their parts of dQ,
// deterministic turns, and the stores of gradients.
#pragma once
#include "attn/block_list.cuh"
#include "attn/bwd_tile.cuh"
#include "attn/programs.cuh"
#include "attn/query_range.cuh"
#include "attn/seqlen.cuh"
#include "attn/store_rows.cuh"
#include "attn/tensor_view.cuh"
#include "attn/visibility.cuh"
#include "bwd_params.cuh"
#include "config.cuh"
#include "ptx/address.cuh"
#include "ptx/atomic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "sm80/bwd_layout.cuh"
#include "tile/copy_tile.cuh"

namespace fa::sm80 {

// A thread's warp and lane within its group, recomputed at each use: registers are scarcer than instructions.
template <int GroupWarps>
struct Place {
    int warp, lane;

    // `m_block` is never negative. The compiler does not know that, so it cannot hoist this out of the
    // mainloop.
    __device__ __forceinline__ explicit Place(int m_block = 0) {
        const int thread = thread_index_volatile() + (u32(m_block) >> 31);
        warp = thread / 32 % GroupWarps;
        lane = thread % 32;
    }
};

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

    // Warps with many A fragments in S and dP have no registers for those of two contraction steps.
    static constexpr int kAheadA = CutS::kFragments > 2 ? 0 : 1;

    // ---- Copies ---------------------------------------------------------------------------------

    // The address of a buffer, recomputed at each use.
    __device__ __forceinline__ u32 buffer(const void* within) const {
        const u8* first = reinterpret_cast<const u8*>(&smem);
        return smem_address_volatile(first) + u32(static_cast<const u8*>(within) - first);
    }

    // Lengths on the device are reread from shared memory at each use.
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

    // The tile of queries that step `m_block` visits; steps ascend even where tiles are visited in descending
    // order.
    __device__ __forceinline__ int block(int m_block) const {
        if constexpr (kMaskProgram) {
            return listed().at(m_block);
        } else {
            return query_block(range, descending(), m_block);
        }
    }
    // Whether the mask's program hides nothing of it.
    __device__ __forceinline__ bool is_full(int m_block) const {
        if constexpr (kMaskProgram) return listed().full(m_block);
        return true;
    }
    __device__ __forceinline__ Blocks listed() const {
        return query_list(params, tile.batch, tile.kv_head, tile.n_block);
    }
    __device__ __forceinline__ bool descending() const {
        if constexpr (can_descend<C.mask, C.deterministic>()) return smem.descending;
        return false;
    }

    // A step's number, from which its buffers follow.
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
    // Copies a tile's statistics, which the workspace has for rows past the sequence's end too.
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

    // Starts the copies of K, V and the first tiles of queries. All threads.
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

    // Begins a step: all threads' copies have arrived, and buffers that were read before may be overwritten.
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

    // Fragment `f` of a step's S or dP, as programs see it.
    __device__ __forceinline__ ScorePlace<false> score_place(BwdStep step, int f) const {
        const Here place(step.m_block);
        const int query =
            block(step.m_block) * C.tile_m + CutS::first_m(place.warp) + 16 * f + place.lane / 4;
        return {tile.batch,
                queries(),
                keys(),
                keys() - queries(),
                params.shape.group_size,
                {step.head, step.head},
                {query, query + 8},
                tile.n_block * C.tile_n + CutS::first_n(place.warp) + 2 * (place.lane % 4)};
    }

    // D += A B, divided among the group's warps.
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

    // Interleaves the additions of dQ to its f32 accumulator with the rounds of another product: all at once
    // they would stall the load/store units.
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

    // Deterministic kernels: waits for the tile's turn to add to dQ. Each group has its own turns, for its
    // part.
    __device__ __forceinline__ void await_turn(BwdStep step, int group) const {
        if constexpr (C.deterministic) {
            if (thread_index() == group * L::kGroupThreads) {
                if constexpr (kMaskProgram) {
                    wait_for_rank<kDqParts>(params, tile, step.head, block(step.m_block),
                                            listed().rank(step.m_block), 1, group % kDqParts);
                } else {
                    wait_for_turn<C.tile_m, C.tile_n, kDqParts>(params, visible(), tile, descending(),
                                                                step.head, block(step.m_block), 1,
                                                                group % kDqParts);
                }
            }
            named_barrier_sync(kBarrierGroup + group, L::kGroupThreads);
        }
    }
    // Ends the turn half a step after the additions: the release waits until L2 has made them, which by then
    // it has. One thread releases for the whole group.
    __device__ __forceinline__ void end_turn(BwdStep step, int group) const {
        if constexpr (C.deterministic) {
            named_barrier_sync(kBarrierGroup + group, L::kGroupThreads);
            if (thread_index() == group * L::kGroupThreads)
                red_release_increment(
                    dq_semaphore<kDqParts>(params, tile, step.head, block(step.m_block), group % kDqParts));
        }
    }

    // ---- P and dS in shared memory --------------------------------------------------------------

    // The address, in the tile of P or dS at `address`, of registers i to i + 3 of S or dP once they are
    // rounded: that of the word in the upper half of fragment 0. The lower half and the other fragments are
    // at fixed distances from it. A warp accesses eight rows of four words at a time, which the swizzle
    // spreads over all banks.
    static constexpr u32 kFragmentBytes = 16 * L::Pds::kRowBytes, kLowerBytes = 8 * L::Pds::kRowBytes;
    __device__ __forceinline__ static u32 words_at(u32 address, int i, const Here& place) {
        using Tile = typename L::Pds;
        const int row = CutS::first_m(place.warp) + place.lane / 4;
        const int column = CutS::first_n(place.warp) + 2 * i;
        return address + row * Tile::kRowBytes + place.lane % 4 * 4 + Tile::panel_offset(column) +
               ((Tile::chunk(column) ^ Tile::twist(row)) << 4);
    }

    // Stores a warp's part of group `group`'s gradient (dV or dK) or, with split heads, adds it to the f32
    // accumulator; in deterministic kernels the splits take turns.
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
                named_barrier_sync(kBarrierGroup + group, L::kGroupThreads);
                if (thread_index() == group * L::kGroupThreads)
                    red_release_increment(dkv_semaphore(params, tile, group));
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

}  // namespace fa::sm80
