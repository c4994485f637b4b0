// Attention forward for SM80 and later, by cp.async and mma.sync: all warps load, and each computes its own
// query rows, or with divide_keys its own keys.
#pragma once
#include "attn/alibi.cuh"
#include "attn/block_list.cuh"
#include "attn/block_range.cuh"
#include "attn/code_rows.cuh"
#include "attn/descales.cuh"
#include "attn/epilogue.cuh"
#include "attn/mask.cuh"
#include "attn/packed_copy.cuh"
#include "attn/paged_copy.cuh"
#include "attn/programs.cuh"
#include "attn/row_place.cuh"
#include "attn/rows.cuh"
#include "attn/scheduler.cuh"
#include "attn/score_mod.cuh"
#include "attn/seqlen.cuh"
#include "attn/softmax.cuh"
#include "attn/split.cuh"
#include "attn/tensor_view.cuh"
#include "attn/visibility.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "sm80/fwd_divided.cuh"
#include "tile/codes.cuh"
#include "tile/copy_tile.cuh"
#include "tile/fragment.cuh"
#include "tile/smem_tile.cuh"
#include "tile/warp_product.cuh"

namespace fa::sm80 {

// ---- Config -------------------------------------------------------------------------------------

template <Sm80FwdConfig C>
struct Traits {
    static_assert(C.divide_keys || C.tile_m % (16 * C.num_warps) == 0, "a warp owns whole m16 fragments");
    static_assert(C.tile_n % 16 == 0, "the k16 steps of P V");
    static_assert(C.head_dim % 16 == 0 && C.head_dim_v % 16 == 0,
                  "the k16 steps of Q K^T and the n8 pairs of P V");
    static_assert(C.stages >= 1 && C.stages <= 4);

    // K and V are codes, copied to stages of their own and converted to one tile of each.
    static constexpr bool kCodes = is_code(C.kv_dtype);
    static_assert(C.swizzle || !kCodes);

    static constexpr int kThreads = 32 * C.num_warps;
    static constexpr int kWarpRows = C.divide_keys ? C.tile_m : C.tile_m / C.num_warps;
    static constexpr int kWarpKeys = C.divide_keys ? C.tile_n / C.num_warps : C.tile_n;  // of a step
    static constexpr int kFragments =
        kWarpRows / 16;  // m16 fragments per warp; they share the fragments of K and V

    using Q = SmemTile<C.tile_m, C.head_dim, C.swizzle>;
    using K = SmemTile<C.tile_n, C.head_dim, C.swizzle>;
    using V = SmemTile<C.tile_n, C.head_dim_v, C.swizzle>;
    using KCodes = CodeTile<K, C.tile_n, kThreads, per_byte(C.kv_dtype)>;
    using VCodes = CodeTile<V, C.tile_n, kThreads, per_byte(C.kv_dtype)>;

    static constexpr Exponential kExponential =
        C.exp2        ? C.fast_math ? Exponential::Base2Approx : Exponential::Base2
        : C.fast_math ? Exponential::NaturalApprox
                      : Exponential::Natural;
    // O and the sums are rescaled only when the maximum exponent has grown by more than this.
    static constexpr int kRescaleThreshold = 8;
    using RowState = Softmax<0, kRescaleThreshold, kExponential, C.fast_math && !C.exact_div>;

    static constexpr TileOrder kOrder = C.reverse_blocks ? TileOrder::LongestFirst : TileOrder::Natural;

    // 16 x 16 blocks of K or V read ahead of the products that use them.
    static constexpr int kAhead = 2;
};

// ---- Shared memory ------------------------------------------------------------------------------

// The planner's account has the same buffers at the same offsets; the generated unit asserts the size. With Q
// in registers, Q shares memory with K and V: it is read before the stages it overlaps are filled, and it is
// at the end, so that the first K usually does not overlap it. Codes have stages, each with the descales of
// its rows, before the tiles that they are converted to.
template <Sm80FwdConfig C>
struct alignas(128) SharedStorage {
    using T = Traits<C>;
    static constexpr int kTiles = T::kCodes ? 1 : C.stages;
    static constexpr int kFirst = C.q_in_regs ? 0 : T::Q::kBytes;
    static constexpr int kKCodes = kFirst;
    static constexpr int kVCodes = kKCodes + (T::kCodes ? C.stages * T::KCodes::kBytes : 0);
    static constexpr int kDescales = kVCodes + (T::kCodes ? C.stages * T::VCodes::kBytes : 0);
    static constexpr int kK = kDescales + (T::kCodes ? C.stages * 2 * C.tile_n * 4 : 0);
    static constexpr int kV = kK + kTiles * T::K::kBytes;
    static constexpr int kKeyValueBytes = kV + kTiles * T::V::kBytes - kFirst;
    static constexpr int kQ = C.q_in_regs ? max_of(kKeyValueBytes - T::Q::kBytes, 0) : 0;

    u8 bytes[max_of(kQ + T::Q::kBytes,
                    kFirst + kKeyValueBytes)];  // [tile_m, head_dim]; [stages][tile_n, head_dim(_v)]
};

// The tile's row of a thread's first accumulator.
template <Sm80FwdConfig C>
__device__ __forceinline__ int own_row(int thread) {
    return (C.divide_keys ? 0 : thread / 32 * Traits<C>::kWarpRows) + thread % 32 / 4;
}

// The first of a warp's keys in a step.
template <Sm80FwdConfig C>
__device__ __forceinline__ int own_key(int thread) {
    return C.divide_keys ? thread / 32 * Traits<C>::kWarpKeys : 0;
}

// ---- Codes --------------------------------------------------------------------------------------

// The copies of codes of K, or with Values of V, and their conversion.
template <Sm80FwdConfig C, bool Values>
struct CodeCopy {
    using T = Traits<C>;
    using Smem = SharedStorage<C>;
    using Codes = Either<Values, typename T::VCodes, typename T::KCodes>;
    static constexpr int kStages = Values ? Smem::kVCodes : Smem::kKCodes;
    static constexpr int kTile = Values ? Smem::kV : Smem::kK;

    CodeRows<C.paged> rows;
    int row_bytes;

    template <class Seqlen>
    __device__ __forceinline__ static CodeCopy of(const FwdParams& params, const Seqlen& seqlen, int batch,
                                                  int head) {
        const CacheParams& cache = cache_of(params);
        return {CodeRows<C.paged>::of(params, Values ? params.v : params.k, Values ? cache.v : cache.k,
                                      seqlen, batch, head),
                (Values ? params.shape.head_dim_v : params.shape.head_dim) / per_byte(C.kv_dtype)};
    }

    // The descale of each row of a stage.
    __device__ __forceinline__ static u32 descales(int stage) {
        return Smem::kDescales + (2 * stage + Values) * C.tile_n * 4;
    }

    // Starts to copy the keys of tile `n_block` to `stage`. Those past the end become zeros.
    __device__ __forceinline__ void start(u32 smem, int stage, int n_block) const {
        const int thread = thread_index_volatile();
        Codes::start(smem + kStages + stage * Codes::kBytes, thread, rows.first, row_bytes, [&](int sweep) {
            const int row = Codes::row(thread, sweep), key = n_block * C.tile_n + row;
            const auto place = rows.place_of(key, rows.entry_of(key), thread % Codes::kLanes == 0);
            if (rows.descales != nullptr && thread % Codes::kLanes == 0)
                rows.copy_descale(smem + descales(stage) + row * 4, place);
            return place.at;
        });
    }

    // Converts the codes of `stage`, which have arrived, to the tile.
    __device__ __forceinline__ void convert(u8* smem, int stage) const {
        const int thread = thread_index_volatile();
        const u8* const codes = smem + kStages + stage * Codes::kBytes;
        const float* const factors = reinterpret_cast<const float*>(smem + descales(stage));
        Codes::template convert<C.kv_dtype, C.dtype>(codes, smem + kTile, thread,
                                                     rows.descales != nullptr ? factors : nullptr);
    }
};
struct NoCodeCopy {
    template <class... Of>
    __device__ __forceinline__ static NoCodeCopy of(const Of&...) {
        return {};
    }
};

// ---- Operands of the products, as warp_multiply() reads them ------------------------------------

// Q, from shared memory, or from registers filled by read_all(); with divide_keys in FourColumns' order.
template <Sm80FwdConfig C>
struct QOperand {
    using T = Traits<C>;
    using Registers = u32[C.q_in_regs ? C.head_dim / 16 : 1][T::kFragments][4];
    static constexpr int kBlocks = T::kFragments;

    Registers& registers;
    Either<C.divide_keys, FourColumns<typename T::Q, Operand::A>,
           FragmentReader<typename T::Q, Operand::A, C.ldmatrix>>
        reader;
    int first_row;

    __device__ __forceinline__ QOperand(Registers& registers, int first_row)
        : registers(registers), first_row(first_row) {}

    __device__ __forceinline__ void read_shared(u32 (&regs)[4], u32 address, int block, int step) const {
        reader.read(regs, address + first_row * T::Q::kRowBytes, 16 * block, 16 * step);
    }
    __device__ __forceinline__ void read_all(u32 address) const {
#pragma unroll
        for (int step = 0; step < C.head_dim / 16; ++step) {
#pragma unroll
            for (int f = 0; f < T::kFragments; ++f) read_shared(registers[step][f], address, f, step);
        }
    }
    __device__ __forceinline__ void read(u32 (&regs)[4], u32 address, int block, int step) const {
        if constexpr (C.q_in_regs) {
#pragma unroll
            for (int i = 0; i < 4; ++i) regs[i] = registers[step][block][i];
        } else {
            read_shared(regs, address, block, step);
        }
    }
};

template <Sm80FwdConfig C>
struct KOperand {
    using T = Traits<C>;
    static constexpr int kBlocks = C.tile_n / 16;
    FragmentReader<typename T::K, Operand::BStoredNK, C.ldmatrix> reader;

    __device__ __forceinline__ void read(u32 (&regs)[4], u32 address, int block, int step) const {
        reader.read(regs, address, 16 * block, 16 * step);
    }
};

template <Sm80FwdConfig C>
struct VOperand {
    using T = Traits<C>;
    static constexpr int kBlocks = C.head_dim_v / 16;
    FragmentReader<typename T::V, Operand::BStoredKN, C.ldmatrix> reader;

    __device__ __forceinline__ void read(u32 (&regs)[4], u32 address, int block, int step) const {
        reader.read(regs, address, 16 * step, 16 * block);
    }
};

// P, packed from the registers of S, which are in the order of an A operand (PTX ISA, mma.m16n8k16).
// `weigh(p, fragment, step)` multiplies those of a step by a program's weights.
template <Sm80FwdConfig C, class Weigh>
struct POperand {
    using T = Traits<C>;
    static constexpr int kBlocks = T::kFragments;
    const float (&s)[T::kFragments][T::kWarpKeys / 2];
    const Weigh& weigh;

    __device__ __forceinline__ void read(u32 (&regs)[4], u32, int block, int step) const {
        if constexpr (weighs()) {
            float p[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) p[i] = s[block][8 * step + i];
            weigh(p, block, step);
#pragma unroll
            for (int i = 0; i < 4; ++i) regs[i] = pack<C.dtype>(p[2 * i], p[2 * i + 1]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                regs[i] = pack<C.dtype>(s[block][8 * step + 2 * i], s[block][8 * step + 2 * i + 1]);
        }
    }
};

// Computes the exponentials of the next 16 keys between the products of the current 16, so that the
// special-function units and the tensor cores work at the same time.
template <Sm80FwdConfig C>
struct Exponentials {
    using T = Traits<C>;
    float (&s)[T::kFragments][T::kWarpKeys / 2];
    typename T::RowState (&rows)[T::kFragments];
    float scale;

    template <int Rounds>
    __device__ __forceinline__ void round(int number) const {
        constexpr int kSteps = T::kWarpKeys / 16, kBlocks = Rounds / kSteps;
        constexpr int kScores = 8 * T::kFragments, kShare = ceil_div(kScores, kBlocks);
        const int k = number / kBlocks, n = number % kBlocks;
#pragma unroll
        for (int share = 0; share < kShare; ++share) {
            const int score = n * kShare + share;
            if (k + 1 < kSteps && score < kScores) {
                rows[score / 8].template exponentiate<1>(s[score / 8], 8 * (k + 1) + score % 8, scale);
            }
        }
    }
};

}  // namespace fa::sm80

namespace fa {

template <Sm80FwdConfig C>
constexpr int sm80_fwd_smem_bytes =
    sizeof(Either<C.divide_keys, sm80::DividedStorage<C>, sm80::SharedStorage<C>>);

// ---- Kernel -------------------------------------------------------------------------------------

template <Sm80FwdConfig C>
__device__ __forceinline__ void sm80_fwd(const FwdParams& params) {
    using T = sm80::Traits<C>;
    using Smem = sm80::SharedStorage<C>;
    using Divided = sm80::DividedStorage<C>;
    const u32 smem = smem_address(shared_memory<Either<C.divide_keys, Divided, Smem>>().bytes);
    const u32 smem_q = smem + (C.divide_keys ? 0 : Smem::kQ);

    const int heads = C.pack_gqa ? params.shape.heads_kv : params.shape.heads_q;
    // The grid is sized for the most tiles that sequences of unknown lengths can have.
    if constexpr (C.varied) {
        if (cta_index() >= work_tiles<true>(params)) return;
    }
    const WorkTile tile = work_tile_at<T::kOrder, C.varied, C.split>(params, cta_index(), heads);
    const int kv_head = C.pack_gqa ? tile.head : tile.head / params.shape.group_size;
    const auto seqlen = Seqlen<C.varied>::of(params, tile.batch);
    const Visibility<C.mask, C.varied> visible{params.shape, seqlen};
    const Rows<C.pack_gqa> queries(params.shape);
    const int tile_rows = fa::tile_rows<C.pack_gqa, C.tile_m>(params);
    const int first_row = tile.m_block * tile_rows;
    const int end_row = queries.end(seqlen, tile.m_block, tile_rows);
    const QueryEnds ends(seqlen, tile.m_block, tile_queries<C.pack_gqa, C.tile_m>(params));
    const Blocks blocks = key_list(params, tile.batch, tile.head, tile.m_block);
    const BlockRange all = blocks.within(key_blocks<C.tile_n>(visible, ends.first, ends.last));
    BlockRange range = all;
    if constexpr (C.split) range = part_of(all, tile.split, tile.splits);

    // The warp's first row within the tile.
    const int warp_row = C.divide_keys ? 0 : thread_index() / 32 * T::kWarpRows;

    if (range.empty()) {
        if (C.divide_keys && thread_index() >= 32) return;  // one warp has all rows
        for (int f = 0; f < T::kFragments; ++f) {
            const int row = sm80::own_row<C>(thread_index()) + 16 * f;
            if (C.split && tile.splits > 1) {
                store_nothing_partial(workspace_rows(params, tile, heads), first_row + row, end_row, row);
            } else {
                store_nothing_seen<C.pack_gqa, C.sinks>(params, seqlen, first_row + row, end_row, tile.head,
                                                        tile.batch);
            }
        }
        return;
    }

    TileScores<T::kCodes> scores(params);
    scores.of_tile(params, tile.batch, kv_head);
    const ScoreMod<C.softcap> score_mod{scores.params};
    // With ALiBi and programs the scores are exponents already.
    const float to_exponent = C.exp2 ? score_mod.to_log2() : score_mod.to_natural();
    const float scale = C.alibi || kScoreProgram ? 1.f : to_exponent;
    const float unit = C.exp2 ? kLog2e : 1.f;  // exponents per natural unit
    float slope = 0.f;
    if constexpr (C.alibi && !C.pack_gqa)
        slope = alibi_slope<C.mask>(params.mods, tile.batch, tile.head, unit);

    float o[T::kFragments][C.head_dim_v / 2];
    float s[T::kFragments][T::kWarpKeys / 2];
    u32 q[C.q_in_regs ? C.head_dim / 16 : 1][T::kFragments][4];
    typename T::RowState rows[T::kFragments];
#pragma unroll
    for (int f = 0; f < T::kFragments; ++f) {
#pragma unroll
        for (int i = 0; i < C.head_dim_v / 2; ++i) o[f][i] = 0.f;
    }

    // ---- Copies ---------------------------------------------------------------------------------

    const auto copy_q =
        QueryCopy<C.pack_gqa, typename T::Q, T::kThreads>::of(params, seqlen, tile.batch, tile.head);
    using CopyK = KeyCopy<C.paged, typename T::K, T::kThreads>;
    using CopyV = KeyCopy<C.paged, typename T::V, T::kThreads>;
    const auto copy_k = CopyK::of(params, params.k, seqlen, tile.batch, kv_head, params.shape.head_dim);
    const auto copy_v = CopyV::of(params, params.v, seqlen, tile.batch, kv_head, params.shape.head_dim_v);
    using CodesK = Either<T::kCodes, sm80::CodeCopy<C, false>, sm80::NoCodeCopy>;
    using CodesV = Either<T::kCodes, sm80::CodeCopy<C, true>, sm80::NoCodeCopy>;
    [[maybe_unused]] const auto codes_k = CodesK::of(params, seqlen, tile.batch, kv_head);
    [[maybe_unused]] const auto codes_v = CodesV::of(params, seqlen, tile.batch, kv_head);
    // The tiles of a stage; codes have one tile each.
    auto stage_k = [&](int stage) { return smem + Smem::kK + (T::kCodes ? 0 : stage * T::K::kBytes); };
    auto stage_v = [&](int stage) { return smem + Smem::kV + (T::kCodes ? 0 : stage * T::V::kBytes); };
    // Only the first tile of keys, the sequence's last, may run past the end.
    auto load = [&](int i, int stage) {
        const int n_block = blocks.at(i);
        if constexpr (T::kCodes) {
            codes_k.start(smem, stage, n_block);
            codes_v.start(smem, stage, n_block);
        } else {
            copy_k.template start<false>(stage_k(stage), n_block * C.tile_n, seqlen.k());
            copy_v.template start<false>(stage_v(stage), n_block * C.tile_n, seqlen.k());
        }
    };
    auto load_first_k = [&] {
        const int n_block = blocks.at(range.end - 1);
        if constexpr (T::kCodes) {
            codes_k.start(smem, 0, n_block);
        } else {
            copy_k.template start<true>(stage_k(0), n_block * C.tile_n, seqlen.k());
        }
    };
    auto load_first_v = [&] {
        const int n_block = blocks.at(range.end - 1);
        if constexpr (T::kCodes) {
            codes_v.start(smem, 0, n_block);
        } else {
            copy_v.template start<true>(stage_v(0), n_block * C.tile_n, seqlen.k());
        }
    };
    auto load_q = [&] { copy_q.template start<true>(smem_q, first_row, end_row); };
    // The warp's own keys, with divide_keys.
    using Tiles = Either<C.divide_keys, sm80::DividedTiles<C>, sm80::NoCodeCopy>;
    [[maybe_unused]] auto tiles = Tiles::of(params, seqlen, tile.batch, kv_head, smem);
    [[maybe_unused]] auto load_own = [&](int i, int stage) {
        if constexpr (C.divide_keys) {
            if (i >= range.begin) {
                tiles.start(stage, blocks.at(i) * C.tile_n);
                if (i - 1 >= range.begin) tiles.read_entry(blocks.at(i - 1) * C.tile_n);
            }
            cp_async_commit();
        }
    };

    // ---- Products -------------------------------------------------------------------------------

    const sm80::QOperand<C> q_operand(q, warp_row);
    const sm80::KOperand<C> k_operand;
    const sm80::VOperand<C> v_operand;
    auto multiply_s = [&](int stage) {
        if constexpr (C.divide_keys) {
            tiles.multiply_s(s, q_operand, smem_q, stage);
        } else {
#pragma unroll
            for (int f = 0; f < T::kFragments; ++f) {
#pragma unroll
                for (int i = 0; i < T::kWarpKeys / 2; ++i) s[f][i] = 0.f;
            }
            warp_multiply<C.dtype, C.head_dim / 16, 0, T::kAhead>(s, q_operand, smem_q, k_operand,
                                                                  stage_k(stage));
        }
    };
    auto multiply_o = [&](int stage, int place) {
        const sm80::Exponentials<C> exponentials{s, rows, scale};
        constexpr int kFirst = C.divide_keys ? T::kWarpKeys / 2 : 8;
#pragma unroll
        for (int f = 0; f < T::kFragments; ++f) rows[f].template exponentiate<kFirst>(s[f], 0, scale);
        // Weights the probabilities of 16 keys of a fragment.
        auto weigh_step = [&](float(&p)[8], int f, int step) {
            const int thread = thread_index_volatile();
            weigh(p, params,
                  row_place<C.pack_gqa>(
                      params.shape, seqlen, tile.batch, tile.head,
                      first_row + sm80::own_row<C>(thread) + 16 * f,
                      blocks.at(place) * C.tile_n + sm80::own_key<C>(thread) + 16 * step + 2 * (thread % 4)));
        };
        const sm80::POperand<C, decltype(weigh_step)> p{s, weigh_step};
        if constexpr (C.divide_keys) {
            tiles.multiply_o(o, p, s, stage);
        } else {
            warp_multiply<C.dtype, C.tile_n / 16, 0, T::kAhead>(o, p, 0, v_operand, stage_v(stage),
                                                                exponentials);
        }
    };

    // ---- One tile of keys -----------------------------------------------------------------------

    // Turns products into masked scores of the tile of keys at place `i`.
    auto modify = [&](int i, bool mask) {
        const int n_block = blocks.at(i);
        if constexpr (kMaskProgram) mask = range.needs_mask(n_block);
#pragma unroll
        for (int f = 0; f < T::kFragments; ++f) {
            score_mod.apply(s[f]);
            if constexpr (C.alibi) {
                const int thread = thread_index_volatile();
                const int row = first_row + sm80::own_row<C>(thread) + 16 * f;
                const int first_key = n_block * C.tile_n + sm80::own_key<C>(thread) + 2 * (thread % 4);
                if constexpr (C.pack_gqa) {
                    const AlibiRows<true, C.mask, true> alibi(params, seqlen, row, tile.head, tile.batch,
                                                              unit);
                    alibi.apply(s[f], to_exponent, first_key);
                } else {
                    const int diagonal = row + seqlen.k() - seqlen.q();
                    add_alibi<C.mask>(s[f], to_exponent, {slope, slope}, {diagonal, diagonal + 8}, first_key);
                }
            }
            if constexpr (kMaskProgram || kScoreProgram) {
                const int thread = thread_index_volatile();
                const auto place =
                    row_place<C.pack_gqa>(params.shape, seqlen, tile.batch, tile.head,
                                          first_row + sm80::own_row<C>(thread) + 16 * f,
                                          n_block * C.tile_n + sm80::own_key<C>(thread) + 2 * (thread % 4));
                apply_programs(s[f], params, scores.params, place, unit, !blocks.full(i));
            }
            if (mask) {
                const int thread = thread_index_volatile();
                auto query_of = [&](int r) {
                    return queries.query(first_row + sm80::own_row<C>(thread) + 16 * f + 8 * r);
                };
                mask_tile(s[f], visible, query_of,
                          n_block * C.tile_n + sm80::own_key<C>(thread) + 2 * (thread % 4));
            }
        }
    };
    // Starts the copy of a later tile into the stage that the previous tile has released.
    auto load_ahead = [&](int n_block, int stage) {
        if constexpr (C.divide_keys) {
            load_own(n_block - (C.stages - 1), stage == 0 ? C.stages - 1 : stage - 1);
        } else if constexpr (C.stages > 1 && !T::kCodes) {
            const int ahead = n_block - (C.stages - 1);
            if (ahead >= range.begin) load(ahead, stage == 0 ? C.stages - 1 : stage - 1);
            cp_async_commit();
        }
    };
    auto compute = [&](int n_block, int stage, bool mask) {
        multiply_s(stage);
        // Issued here, so that the products' first reads precede the copy's instructions.
        load_ahead(n_block, stage);
        modify(n_block, mask);
        float rescale[T::kFragments][2];
        bool grown = false;
#pragma unroll
        for (int f = 0; f < T::kFragments; ++f) {
            rows[f].template take_max<false>(s[f], scale, rescale[f]);
            grown = grown || rescale[f][0] != 1.f || rescale[f][1] != 1.f;
        }
        // Usually no maximum of the warp's rows has grown.
        if (warp_any(grown)) {
#pragma unroll
            for (int f = 0; f < T::kFragments; ++f) scale_rows(o[f], rescale[f]);
        }
        multiply_o(stage, n_block);
    };
    // Whether the warp's rows see no key of its part of tile `n_block`.
    auto hidden = [&](int n_block) {
        const int first = queries.query(first_row + warp_row);
        const int last = queries.query(first_row + warp_row + T::kWarpRows - 1);
        const int first_key = n_block * C.tile_n + sm80::own_key<C>(thread_index());
        return first_key >= visible.keys_end(last) || first_key + T::kWarpKeys <= visible.keys_begin(first);
    };

    // ---- Mainloop: tiles of keys from the last to the first -------------------------------------

    int stage = 0;
    auto step = [&](int n_block, bool mask) {
        if constexpr (C.divide_keys) {
            // As below, with the warp's copies alone.
            cp_async_wait<C.stages - 2>();
            warp_sync();
        } else if constexpr (T::kCodes) {
            cp_async_wait<C.stages - 1>();
            // All threads' copies have arrived, and the previous step's tiles have been read.
            cta_sync();
            codes_k.convert(shared_memory<Smem>().bytes, stage);
            codes_v.convert(shared_memory<Smem>().bytes, stage);
            cta_sync();
            if (n_block - C.stages >= range.begin) load(n_block - C.stages, stage);
            cp_async_commit();
        } else if constexpr (C.stages == 1) {
            if (n_block != range.end - 1) {
                cta_sync();
                load(n_block, 0);
                cp_async_commit();
            }
            cp_async_wait<0>();
            cta_sync();
        } else {
            // All but the newest groups have arrived; after the barrier the previous stage is free.
            cp_async_wait<C.stages - 2>();
            cta_sync();
        }
        // Warps without rows, most of them in decoding, convert codes only.
        const bool idle = T::kCodes && !C.divide_keys && first_row + warp_row >= end_row;
        const bool has_whole_tiles = C.mask == MaskKind::Full && !C.divide_keys;
        if (!idle && (kMaskProgram || !C.loop_split || has_whole_tiles || !mask || !hidden(n_block))) {
            compute(n_block, stage, mask);
        } else {
            load_ahead(n_block, stage);
        }
        stage = stage + 1 == C.stages ? 0 : stage + 1;
    };

    if constexpr (C.divide_keys) {
        tiles.read_entry(blocks.at(range.end - 1) * C.tile_n);
        load_q();
        cp_async_commit();
#pragma unroll
        for (int i = 0; i < C.stages - 1; ++i) load_own(range.end - 1 - i, i);
        cp_async_wait<C.stages - 1>();
        cta_sync();
        if constexpr (C.q_in_regs) q_operand.read_all(smem_q);
    } else if constexpr (C.q_in_regs) {
        // The first K does not overlap Q.
        constexpr bool kClear = Smem::kQ >= (T::kCodes ? Smem::kK : T::K::kBytes);
        load_q();
        cp_async_commit();
        if constexpr (kClear) {
            load_first_k();
            cp_async_commit();
        }
        cp_async_wait<kClear ? 1 : 0>();
        cta_sync();
        q_operand.read_all(smem_q);
        cta_sync();
        if constexpr (!kClear) load_first_k();
    } else {
        load_q();
        load_first_k();
    }
    if constexpr (!C.divide_keys) {
        load_first_v();
        cp_async_commit();
#pragma unroll
        for (int i = 1; i < C.stages - (T::kCodes ? 0 : 1); ++i) {
            if (range.end - 1 - i >= range.begin) load(range.end - 1 - i, i);
            cp_async_commit();
        }
    }

    int n_block = range.end - 1;
    if constexpr (C.loop_split && C.divide_keys && !kMaskProgram) {
        // One loop: a mask on the few scores of a warp costs less than the code of another.
        for (; n_block >= range.begin; --n_block) step(n_block, range.needs_mask(n_block));
    } else if constexpr (C.loop_split && !kMaskProgram) {
        for (; n_block >= max(range.begin, range.full_end); --n_block) step(n_block, true);
        for (; n_block >= max(range.begin, range.full_begin); --n_block) step(n_block, false);
        if constexpr (C.mask == MaskKind::Window) {
            for (; n_block >= range.begin; --n_block) step(n_block, true);
        }
    } else {
        for (; n_block >= range.begin; --n_block) step(n_block, true);
    }

    // ---- Epilogue -------------------------------------------------------------------------------

    if constexpr (C.split) let_next_launch_start();
    // The work tile is recomputed: the mainloop has no registers to keep it in.
    const WorkTile output = work_tile_at<T::kOrder, C.varied, C.split>(params, cta_index_volatile(), heads);
    const auto output_len = Seqlen<C.varied>::of(params, output.batch);
    const int own_row = sm80::own_row<C>(thread_index_volatile());
    const int output_rows = fa::tile_rows<C.pack_gqa, C.tile_m>(params);
    const int row = output.m_block * output_rows + own_row;
    const int end = Rows<C.pack_gqa>(params.shape).end(output_len, output.m_block, output_rows);
    // Stores `sums`, whose columns begin at `column`.
    auto store = [&](const auto& sums, int column) {
#pragma unroll
        for (int f = 0; f < T::kFragments; ++f) {
            float factor[2], lse[2];
            auto descale = [&] {
                if constexpr (T::kCodes) {
                    const int head = C.pack_gqa ? output.head : output.head / params.shape.group_size;
                    descale_rows(params, output.batch, head, factor);
                }
            };
            if (C.split && output.splits > 1) {
                rows[f].finish(factor, lse);
                if constexpr (kScoreProgram) rows[f].keep_lowest(lse);
                descale();
                store_partial(workspace_rows(params, output, heads), params.shape.head_dim_v, sums[f], factor,
                              lse, row + 16 * f, end, own_row + 16 * f, -column, column == 0);
            } else {
                finish_rows<C.pack_gqa, C.sinks>(params, rows[f], row + 16 * f, output.head, factor, lse);
                if constexpr (kScoreProgram) rows[f].keep_lowest(lse);
                descale();
                store_output<C.dtype, C.pack_gqa>(params, output_len, sums[f], factor, lse, row + 16 * f, end,
                                                  output.head, output.batch, -column, column == 0);
            }
        }
    };
    if constexpr (C.divide_keys) {
        // A warp stores some of the columns of all rows.
        constexpr int kBlocks = sm80::DividedTraits<C>::kOwnBlocks;
        float own[T::kFragments][8 * kBlocks];
        sm80::combine_warps<C>(shared_memory<Divided>().bytes, o, rows, own);
        store(own, 16 * kBlocks * warp_index());
    } else {
        store(o, 0);
    }
}

}  // namespace fa
