// Attention forward for SM80 and later: all warps load by cp.async and multiply by mma.sync; each owns its query rows.
#pragma once
#include "attn/block_range.cuh"
#include "attn/epilogue.cuh"
#include "attn/mask.cuh"
#include "attn/scheduler.cuh"
#include "attn/softmax.cuh"
#include "config.cuh"
#include "params.cuh"
#include "ptx/address.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "tile/copy_tile.cuh"
#include "tile/fragment.cuh"
#include "tile/smem_tile.cuh"

namespace fa::sm80 {

// ---- Config -----------------------------------------------------------------------------------------------------------

template <Sm80FwdConfig C>
struct Traits {
    static_assert(C.tile_m % (16 * C.num_warps) == 0, "a warp owns whole m16 fragments");
    static_assert(C.tile_n % 16 == 0, "the k16 steps of P V");
    static_assert(C.head_dim % 16 == 0 && C.head_dim_v % 16 == 0, "the k16 steps of Q K^T and the n8 pairs of P V");
    static_assert(C.stages >= 1 && C.stages <= 4);

    static constexpr int kThreads = 32 * C.num_warps;
    static constexpr int kWarpRows = C.tile_m / C.num_warps;
    static constexpr int kFragments = kWarpRows / 16;  // m16 fragments of a warp; they share what is read of K and V

    using Q = SmemTile<C.tile_m, C.head_dim, C.swizzle>;
    using K = SmemTile<C.tile_n, C.head_dim, C.swizzle>;
    using V = SmemTile<C.tile_n, C.head_dim_v, C.swizzle>;

    static constexpr Exponential kExponential = C.exp2 ? C.fast_math ? Exponential::Base2Approx : Exponential::Base2
                                                : C.fast_math ? Exponential::NaturalApprox
                                                              : Exponential::Natural;
    // O and the sums keep their scale until the maximum has grown by more than this many powers.
    static constexpr int kRescaleThreshold = 8;
    using RowState = Softmax<0, kRescaleThreshold, kExponential, C.fast_math>;

    static constexpr TileOrder kOrder = C.reverse_blocks ? TileOrder::LongestFirst : TileOrder::Natural;

    // Blocks of K or V that are read ahead of the products that use them.
    static constexpr int kAhead = 2;
};

// ---- Shared memory ----------------------------------------------------------------------------------------------------

// The planner's account (crates/fa-planner/src/sm80.rs) has the same buffers at the same offsets; the generated unit
// asserts the size. With Q in registers, Q shares memory with K and V: it is read before the stages under it are filled,
// and lies at the end, so that the first K is usually clear of it.
template <Sm80FwdConfig C>
struct alignas(128) SharedStorage {
    using T = Traits<C>;
    static constexpr int kKeyValueBytes = C.stages * (T::K::kBytes + T::V::kBytes);
    static constexpr int kQ = C.q_in_regs ? max_of(kKeyValueBytes - T::Q::kBytes, 0) : 0;
    static constexpr int kK = C.q_in_regs ? 0 : T::Q::kBytes;
    static constexpr int kV = kK + C.stages * T::K::kBytes;

    u8 bytes[max_of(kQ + T::Q::kBytes, kK + kKeyValueBytes)];  // [tile_m, head_dim]; [stages][tile_n, head_dim(_v)]
};

// Row of the tile that a thread's first accumulators belong to.
template <Sm80FwdConfig C>
__device__ __forceinline__ int own_row(int thread) {
    return thread / 32 * Traits<C>::kWarpRows + thread % 32 / 4;
}

}  // namespace fa::sm80

namespace fa {

template <Sm80FwdConfig C>
constexpr int sm80_fwd_smem_bytes = sizeof(sm80::SharedStorage<C>);

// ---- Kernel -----------------------------------------------------------------------------------------------------------

template <Sm80FwdConfig C>
__device__ __forceinline__ void sm80_fwd(const FwdParams& params) {
    using T = sm80::Traits<C>;
    using Smem = sm80::SharedStorage<C>;
    const u32 smem = smem_address(shared_memory<Smem>().bytes);
    const u32 smem_q = smem + Smem::kQ;

    const Tile tile = tile_at<T::kOrder>(params, cta_index(), params.shape.heads_q);
    const int kv_head = tile.head / params.shape.group_size;
    const int first_query = tile.m_block * C.tile_m;
    const int last_query = min(first_query + C.tile_m, params.shape.seqlen_q) - 1;
    const BlockRange range = block_range<C.mask, C.tile_n>(params, first_query, last_query);

    const int warp_row = thread_index() / 32 * T::kWarpRows;  // the warp's first row within the tile

    if (range.empty()) {
        for (int f = 0; f < T::kFragments; ++f) {
            const int row = first_query + sm80::own_row<C>(thread_index()) + 16 * f;
            store_nothing_seen<false>(params, row, tile.head, tile.batch);
        }
        return;
    }

    // Exponents are of 2 or of e; capped scores are scaled already.
    const float scale = C.softcap ? (C.exp2 ? kLog2e : 1.f) : C.exp2 ? params.score.scale_log2 : params.score.scale;

    float o[T::kFragments][C.head_dim_v / 2];
    float s[T::kFragments][C.tile_n / 2];
    u32 q[C.q_in_regs ? C.head_dim / 16 : 1][T::kFragments][4];
    typename T::RowState rows[T::kFragments];
#pragma unroll
    for (int f = 0; f < T::kFragments; ++f) {
#pragma unroll
        for (int i = 0; i < C.head_dim_v / 2; ++i) o[f][i] = 0.f;
    }

    // ---- Copies ----

    const TileCopy<typename T::Q, T::kThreads> copy_q{
        static_cast<const u16*>(params.q.data) + tile.batch * params.q.strides.batch + tile.head * params.q.strides.head,
        params.q.strides.seq, params.shape.head_dim};
    const TileCopy<typename T::K, T::kThreads> copy_k{
        static_cast<const u16*>(params.k.data) + tile.batch * params.k.strides.batch + kv_head * params.k.strides.head,
        params.k.strides.seq, params.shape.head_dim};
    const TileCopy<typename T::V, T::kThreads> copy_v{
        static_cast<const u16*>(params.v.data) + tile.batch * params.v.strides.batch + kv_head * params.v.strides.head,
        params.v.strides.seq, params.shape.head_dim_v};
    auto stage_k = [&](int stage) { return smem + Smem::kK + stage * T::K::kBytes; };
    auto stage_v = [&](int stage) { return smem + Smem::kV + stage * T::V::kBytes; };
    // Only the first block, the sequence's last, may run past the end of the keys.
    auto load = [&](int block, int stage) {
        copy_k.template start<false>(stage_k(stage), block * C.tile_n, params.shape.seqlen_k);
        copy_v.template start<false>(stage_v(stage), block * C.tile_n, params.shape.seqlen_k);
    };
    auto load_first_k = [&] { copy_k.template start<true>(stage_k(0), (range.end - 1) * C.tile_n, params.shape.seqlen_k); };
    auto load_first_v = [&] { copy_v.template start<true>(stage_v(0), (range.end - 1) * C.tile_n, params.shape.seqlen_k); };
    auto load_q = [&] { copy_q.template start<true>(smem_q, first_query, params.shape.seqlen_q); };

    // ---- Products ----

    const FragmentReader<typename T::Q, Operand::A, C.ldmatrix> q_reader;
    const FragmentReader<typename T::K, Operand::BStoredNK, C.ldmatrix> k_reader;
    const FragmentReader<typename T::V, Operand::BStoredKN, C.ldmatrix> v_reader;
    auto read_q = [&](u32 (&into)[T::kFragments][4], int k) {
#pragma unroll
        for (int f = 0; f < T::kFragments; ++f) {
            q_reader.read(into[f], smem_q + warp_row * T::Q::kRowBytes, 16 * f, 16 * k);
        }
    };

    // S = Q K^T. What the products use is read some blocks ahead, so that they need not wait for shared memory.
    auto multiply_s = [&](u32 tile_k) {
        constexpr int kSteps = C.head_dim / 16, kBlocks = C.tile_n / 16, kTotal = kSteps * kBlocks;
        constexpr int kRing = T::kAhead + 1;
        u32 b[kRing][4];
        auto read_b = [&](int i) { k_reader.read(b[i % kRing], tile_k, i % kBlocks * 16, i / kBlocks * 16); };
#pragma unroll
        for (int i = 0; i < min_of(T::kAhead, kTotal); ++i) read_b(i);
#pragma unroll
        for (int f = 0; f < T::kFragments; ++f) {
#pragma unroll
            for (int i = 0; i < C.tile_n / 2; ++i) s[f][i] = 0.f;
        }
#pragma unroll
        for (int i = 0; i < kTotal; ++i) {
            const int k = i / kBlocks, n = i % kBlocks;
            if (i + T::kAhead < kTotal) read_b(i + T::kAhead);
            if constexpr (!C.q_in_regs) {
                if (n == 0) read_q(q[0], k);
            }
#pragma unroll
            for (int f = 0; f < T::kFragments; ++f) {
                const auto& a = q[C.q_in_regs ? k : 0][f];
                mma_m16n8k16<C.dtype>(s[f] + 8 * n, a, b[i % kRing][0], b[i % kRing][1]);
                mma_m16n8k16<C.dtype>(s[f] + 8 * n + 4, a, b[i % kRing][2], b[i % kRing][3]);
            }
        }
    };

    // O += P V, where P are the weights of the scores in S. The exponentials of the next 16 keys stand between the products
    // of these, so that the special-function units and the tensor cores work side by side.
    auto multiply_o = [&](u32 tile_v) {
        constexpr int kSteps = C.tile_n / 16, kBlocks = C.head_dim_v / 16, kTotal = kSteps * kBlocks;
        constexpr int kRing = T::kAhead + 1;
        constexpr int kScores = 8 * T::kFragments, kShare = ceil_div(kScores, kBlocks);
        u32 b[kRing][4];
        auto read_b = [&](int i) { v_reader.read(b[i % kRing], tile_v, i / kBlocks * 16, i % kBlocks * 16); };
#pragma unroll
        for (int i = 0; i < min_of(T::kAhead, kTotal); ++i) read_b(i);
#pragma unroll
        for (int f = 0; f < T::kFragments; ++f) rows[f].template weigh<8>(s[f], 0, scale);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            // Register order of S is already that of an A operand (PTX ISA, mma.m16n8k16 fragments).
            u32 p[T::kFragments][4];
#pragma unroll
            for (int f = 0; f < T::kFragments; ++f) {
#pragma unroll
                for (int i = 0; i < 4; ++i) p[f][i] = pack<C.dtype>(s[f][8 * k + 2 * i], s[f][8 * k + 2 * i + 1]);
            }
#pragma unroll
            for (int n = 0; n < kBlocks; ++n) {
                const int i = k * kBlocks + n;
                if (i + T::kAhead < kTotal) read_b(i + T::kAhead);
#pragma unroll
                for (int f = 0; f < T::kFragments; ++f) {
                    mma_m16n8k16<C.dtype>(o[f] + 8 * n, p[f], b[i % kRing][0], b[i % kRing][1]);
                    mma_m16n8k16<C.dtype>(o[f] + 8 * n + 4, p[f], b[i % kRing][2], b[i % kRing][3]);
                }
#pragma unroll
                for (int share = 0; share < kShare; ++share) {
                    const int score = n * kShare + share;
                    if (k + 1 < kSteps && score < kScores) {
                        rows[score / 8].template weigh<1>(s[score / 8], 8 * (k + 1) + score % 8, scale);
                    }
                }
            }
        }
    };

    // ---- One block of keys ----

    // Scores to capped and masked scores.
    auto prepare = [&](int block, bool mask) {
#pragma unroll
        for (int f = 0; f < T::kFragments; ++f) {
            if constexpr (C.softcap) cap_scores(s[f], params.score.softcap_exponent, params.score.softcap);
            if (mask) {
                const int thread = thread_index_volatile();
                const int first = block * C.tile_n + 2 * (thread % 4);
                ColumnLimits limits;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int query = first_query + sm80::own_row<C>(thread) + 16 * f + 8 * r;
                    limits.begin[r] = keys_begin<C.mask>(params, query) - first;
                    limits.end[r] = keys_end<C.mask>(params, query) - first;
                }
                mask_scores<C.mask == MaskKind::Window>(s[f], limits);
            }
        }
    };
    // The copy into the stage that the block before this one has left, for as many blocks on as there are other stages.
    auto load_ahead = [&](int block, int stage) {
        if constexpr (C.stages > 1) {
            const int ahead = block - (C.stages - 1);
            if (ahead >= range.begin) load(ahead, stage == 0 ? C.stages - 1 : stage - 1);
            cp_async_commit();
        }
    };
    auto compute = [&](int block, int stage, bool mask) {
        multiply_s(stage_k(stage));
        // Only now: the products' first reads come before the copy's instructions.
        load_ahead(block, stage);
        prepare(block, mask);
        float rescale[T::kFragments][2];
        bool grown = false;
#pragma unroll
        for (int f = 0; f < T::kFragments; ++f) {
            rows[f].template take_max<false>(s[f], scale, rescale[f]);
            grown = grown || rescale[f][0] != 1.f || rescale[f][1] != 1.f;
        }
        // The maxima of all of a warp's rows mostly stand.
        if (warp_any(grown)) {
#pragma unroll
            for (int f = 0; f < T::kFragments; ++f) scale_rows(o[f], rescale[f]);
        }
        multiply_o(stage_v(stage));
    };
    // Whether the warp's rows see nothing of a block.
    auto hidden = [&](int block) {
        const int first = first_query + warp_row, last = first + T::kWarpRows - 1;
        return block * C.tile_n >= keys_end<C.mask>(params, last) || (block + 1) * C.tile_n <= keys_begin<C.mask>(params, first);
    };

    // ---- Walk over the blocks, from the last to the first ----

    int stage = 0;
    auto step = [&](int block, bool mask) {
        if constexpr (C.stages == 1) {
            if (block != range.end - 1) {
                cta_sync();
                load(block, 0);
                cp_async_commit();
            }
            cp_async_wait<0>();
            cta_sync();
        } else {
            // All but the newest groups are in; and, past the barrier, the stage before this one is free again.
            cp_async_wait<C.stages - 2>();
            cta_sync();
        }
        // The tile may end in blocks that only its last rows see.
        if (!C.loop_split || C.mask == MaskKind::Full || !mask || !hidden(block)) {
            compute(block, stage, mask);
        } else {
            load_ahead(block, stage);
        }
        stage = stage + 1 == C.stages ? 0 : stage + 1;
    };

    if constexpr (C.q_in_regs) {
        constexpr bool kClear = Smem::kQ >= T::K::kBytes;  // the first K does not touch Q
        load_q();
        cp_async_commit();
        if constexpr (kClear) {
            load_first_k();
            cp_async_commit();
        }
        cp_async_wait<kClear ? 1 : 0>();
        cta_sync();
#pragma unroll
        for (int k = 0; k < C.head_dim / 16; ++k) read_q(q[k], k);
        cta_sync();
        if constexpr (!kClear) load_first_k();
    } else {
        load_q();
        load_first_k();
    }
    load_first_v();
    cp_async_commit();
#pragma unroll
    for (int i = 1; i < C.stages - 1; ++i) {
        if (range.end - 1 - i >= range.begin) load(range.end - 1 - i, i);
        cp_async_commit();
    }

    int block = range.end - 1;
    if constexpr (C.loop_split) {
        for (; block >= max(range.begin, range.full_end); --block) step(block, true);
        for (; block >= max(range.begin, range.full_begin); --block) step(block, false);
        if constexpr (C.mask == MaskKind::Window) {
            for (; block >= range.begin; --block) step(block, true);
        }
    } else {
        for (; block >= range.begin; --block) step(block, true);
    }

    // ---- Epilogue ----

    // The tile's place is worked out a second time: the walk has no registers to keep it in.
    const Tile own = tile_at<T::kOrder>(params, cta_index_volatile(), params.shape.heads_q);
    const int own_query = own.m_block * C.tile_m + sm80::own_row<C>(thread_index_volatile());
#pragma unroll
    for (int f = 0; f < T::kFragments; ++f) {
        float factor[2], lse[2];
        rows[f].finish(factor, lse);
        store_output<C.dtype, false>(params, o[f], factor, lse, own_query + 16 * f, own.head, own.batch);
    }
}

}  // namespace fa
