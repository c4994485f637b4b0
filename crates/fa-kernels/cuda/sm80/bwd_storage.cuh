// What the warps of an SM80-class backward share: a step, shared memory, named barriers.
#pragma once
#include "attn/bwd_tile.cuh"
#include "attn/seqlen.cuh"
#include "config.cuh"
#include "ptx/thread.cuh"
#include "sm80/bwd_layout.cuh"

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

}  // namespace fa::sm80
