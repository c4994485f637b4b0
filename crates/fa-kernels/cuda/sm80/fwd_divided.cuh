// The forward whose warps divide the keys of a step, for few rows (decoding): each warp copies keys of its
// own, reads them as operands without a barrier of the CTA, and has all rows of the tile. Codes are converted
// in registers. The warps' results are combined at the end.
#pragma once
#include "attn/code_rows.cuh"
#include "attn/softmax.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "ptx/address.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/multiply.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "tile/codes.cuh"
#include "tile/fragment.cuh"
#include "tile/smem_tile.cuh"
#include "tile/warp_product.cuh"
#include "types.cuh"

namespace fa::sm80 {

// ---- Config -------------------------------------------------------------------------------------

template <Sm80FwdConfig C>
struct DividedTraits {
    static constexpr bool kCodes = is_code(C.kv_dtype);
    static constexpr int kBytes = kCodes ? 1 : 2;            // of an element of K or V
    enum : bool { kInt4 = C.kv_dtype == Dtype::Int4 };       // elements are of two codes
    static constexpr int kKeys = C.tile_n / C.num_warps;     // of a warp in a step
    static constexpr int kRowBlocks = C.tile_m / 16;         // m16 fragments, which every warp has
    static constexpr int kOutputBlocks = C.head_dim_v / 16;  // k16 blocks of O
    // Blocks of O that a warp stores.
    static constexpr int kOwnBlocks = ceil_div(kOutputBlocks, C.num_warps);

    // Rows of K and V as they are stored, as elements of 16 bits that have two codes, or four of 4 bits.
    using K = SmemTile<kKeys, C.head_dim * kBytes / 2 / per_byte(C.kv_dtype), true>;
    using V = SmemTile<kKeys, C.head_dim_v * kBytes / 2 / per_byte(C.kv_dtype), true>;
};

// Q, then [stages][warp] tiles of K and V, then with codes [stages][K, V][tile_n] descales. The warps'
// results take the place of the stages: O [warp][tile_m][head_dim_v + kPad], maxima and sums
// [2][warp][tile_m].
template <Sm80FwdConfig C>
struct alignas(128) DividedStorage {
    using T = DividedTraits<C>;
    static constexpr int kPad = 8;  // floats, so that rows begin in other banks
    static constexpr int kOutputRow = C.head_dim_v + kPad;

    static constexpr int kStages = C.tile_m * C.head_dim * 2;
    static constexpr int kWarpStage = T::K::kBytes + T::V::kBytes;
    static constexpr int kDescales = kStages + C.stages * C.num_warps * kWarpStage;
    static constexpr int kEnd = kDescales + (T::kCodes ? C.stages * 2 * C.tile_n * 4 : 0);
    static constexpr int kResults = kStages;
    static constexpr int kMaxima = kResults + C.num_warps * C.tile_m * kOutputRow * 4;

    u8 bytes[max_of(kEnd, kMaxima + 2 * C.num_warps * C.tile_m * 4)];

    // A warp's tiles in a stage, and the descales of its keys.
    __device__ __forceinline__ static int k_tile(int stage, int warp) {
        return kStages + (stage * C.num_warps + warp) * kWarpStage;
    }
    __device__ __forceinline__ static int v_tile(int stage, int warp) {
        return k_tile(stage, warp) + T::K::kBytes;
    }
    template <bool Values>
    __device__ __forceinline__ static int descales(int stage, int warp) {
        return kDescales + ((2 * stage + Values) * C.tile_n + warp * T::kKeys) * 4;
    }
};

// ---- Copies -------------------------------------------------------------------------------------

// Copies of a warp's keys of K, or with Values of V: neighbouring lanes copy neighbouring chunks of a row.
template <Sm80FwdConfig C, bool Values>
struct WarpCopy {
    using T = DividedTraits<C>;
    using Tile = Either<Values, typename T::V, typename T::K>;
    static constexpr int kLanes = Tile::kChunks;
    static constexpr int kSweep = 32 / kLanes;  // rows copied at once
    static constexpr int kSweeps = ceil_div(T::kKeys, kSweep);
    static constexpr int kPieces = Tile::kColumns / Tile::kPanel;
    static_assert(T::kKeys % kSweep == 0 && T::kKeys <= 32, "a lane looks up a key");

    CodeRows<C.paged, T::kBytes> rows;
    int bytes;  // of the tensor's rows

    template <class Seqlen>
    __device__ __forceinline__ static WarpCopy of(const FwdParams& params, const Seqlen& seqlen, int batch,
                                                  int head) {
        const int columns = Values ? params.shape.head_dim_v : params.shape.head_dim;
        return {CodeRows<C.paged, T::kBytes>::of(params, Values ? params.v : params.k, descales_of(params),
                                                 seqlen, batch, head),
                columns * T::kBytes / per_byte(C.kv_dtype)};
    }
    __device__ __forceinline__ static CodeDescales descales_of(const FwdParams& params) {
        if constexpr (T::kCodes) {
            return Values ? cache_of(params).v : cache_of(params).k;
        } else {
            return {};
        }
    }

    // The lane's key of the warp's keys from `first` on.
    __device__ __forceinline__ static int key_of(int first) { return first + lane_index() % T::kKeys; }

    // Starts to copy the keys from `first` on to the tile at `tile`; `entry` is the table's of the lane's
    // key. Keys past the end become zeros.
    __device__ __forceinline__ void start(u32 tile, u32 descales, int first, int entry) const {
        const int lane = lane_index(), chunk = lane % kLanes, row = lane / kLanes;
        const auto own = rows.place_of(key_of(first), entry, lane < T::kKeys);
        if constexpr (T::kCodes) {
            if (rows.descales != nullptr && lane < T::kKeys) rows.copy_descale(descales + lane * 4, own);
        }
        const u32 to = tile + Tile::offset(row, 8 * chunk);
        const u8* const column = rows.first + 16 * chunk;
#pragma unroll
        for (int sweep = 0; sweep < kSweeps; ++sweep) {
            const u32 place = shuffle_from(own.at, row + sweep * kSweep);
            const bool exists = place != kNowhere;
            const u8* const from = bytes_after(column, exists ? place : 0, 16);
            // The swizzle of later rows differs by a constant from that of the first.
            const u32 twist = (sweep * kSweep * Tile::kRowBytes / 128 % Tile::kChunks) << 4;
            const u32 sweep_to = (to ^ twist) + sweep * kSweep * Tile::kRowBytes;
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
                const int left = bytes - piece * Tile::kRowBytes - 16 * chunk;
                cp_async_16(sweep_to + piece * Tile::kPanelBytes, from + piece * Tile::kRowBytes,
                            exists ? max(0, min(left, 16)) : 0);
            }
        }
    }
};

// ---- Operands -----------------------------------------------------------------------------------

// Reads fragments of Q or K, as FragmentReader, but in columns 4t to 4t + 3 of each 16, t being the lane's
// number in its quad: in this order a word of codes has both pairs that a lane needs of a contraction step.
template <class Tile, Operand Kind>
struct FourColumns {
    static_assert(Kind == Operand::A || Kind == Operand::BStoredNK);
    u32 lane_offset;

    __device__ __forceinline__ FourColumns() {
        const int lane = lane_index(), row = lane / 4, four = lane % 4;
        lane_offset = row * Tile::kRowBytes + ((Tile::twist(row) ^ four / 2) << 4) + four % 2 * 8;
    }

    // The 16 x 16 fragment at (row, column), multiples of 16.
    __device__ __forceinline__ void read(u32 (&regs)[4], u32 address, int row, int column) const {
        constexpr bool kA = Kind == Operand::A;
        read_pairs(regs[0], regs[kA ? 2 : 1], address, row, column);
        read_pairs(regs[kA ? 1 : 2], regs[3], address, row + 8, column);
    }

  private:
    // Both pairs of the lane in row `row` + lane / 4.
    __device__ __forceinline__ void read_pairs(u32& first, u32& second, u32 address, int row,
                                               int column) const {
        const u32 chunk = Tile::chunk(column) << 4, at = address + lane_offset;
        load_shared_u32x2(
            first, second,
            (Tile::kSwizzled ? at ^ chunk : at + chunk) + row * Tile::kRowBytes + Tile::panel_offset(column));
    }
};

// The same columns of a tile of int4 codes, four to an element.
template <class Tile>
struct FourCodes {
    u32 lane_offset;

    __device__ __forceinline__ FourCodes() {
        const int lane = lane_index(), row = lane / 4;
        lane_offset = row * Tile::kRowBytes + (Tile::twist(row) << 4) + lane % 4 * 2;
    }

    // Of the row `row` below, a multiple of 8, those of a contraction step: 8 bytes, half of a chunk.
    __device__ __forceinline__ u32 read(u32 address, int row, int step) const {
        const u32 chunk = Tile::chunk(step / 2 * 8) << 4, at = address + lane_offset;
        return load_shared_u16((at ^ chunk) + row * Tile::kRowBytes + Tile::panel_offset(step / 2 * 8) +
                               step % 2 * 8);
    }
};

// Two pairs of numbers of a word of codes. With Exact, NaN comes out as NaN.
template <Sm80FwdConfig C, bool Apart, bool Exact>
__device__ __forceinline__ void decode_word(u32 word, u32 (&pairs)[2]) {
    using Numbers = Decoder<C.kv_dtype, C.dtype>;
    Numbers::template decode_pairs<Apart>(word, pairs);
    if constexpr (Exact && Numbers::kHidesNan)
        Numbers::template add_nan<Apart>(Numbers::nan_bits(word), pairs);
}

// Adds to `nan` whether a code of the word is one that decode_pairs() hides: with an addition to its byte the
// top bit changes.
template <Sm80FwdConfig C>
__device__ __forceinline__ void note_nan(u32 word, u32& nan) {
    using Numbers = Decoder<C.kv_dtype, C.dtype>;
    if constexpr (Numbers::kHidesNan) nan |= word + Numbers::kHidden ^ word;
}
// Whether note_nan() has seen one in any lane.
template <Sm80FwdConfig C>
__device__ __forceinline__ bool any_nan(u32 nan) {
    if constexpr (is_code(C.kv_dtype)) {
        return Decoder<C.kv_dtype, C.dtype>::kHidesNan && warp_any(nan & 0x80808080);
    } else {
        return false;
    }
}

// The descales of a warp's keys; null for none.
struct KeyDescales {
    const float* of_keys;

    __device__ __forceinline__ float at(int key) const { return of_keys == nullptr ? 1.f : of_keys[key]; }
};

// K as B, in FourColumns' order. With Exact codes of NaN are NaN; else NaN is noted in `nan`. `held` has the
// words of the last two contraction steps.
template <Sm80FwdConfig C, bool Exact>
struct DividedK {
    using T = DividedTraits<C>;
    static constexpr int kBlocks = T::kKeys / 16;
    using Held = u32[kBlocks][4];

    Held& held;
    u32& nan;
    Either<T::kInt4, FourCodes<typename T::K>,
           Either<T::kCodes, FragmentReader<typename T::K, Operand::BStoredNK, true>,
                  FourColumns<typename T::K, Operand::BStoredNK>>>
        reader;

    __device__ __forceinline__ DividedK(Held& held, u32& nan) : held(held), nan(nan) {}

    __device__ __forceinline__ void read(u32 (&regs)[4], u32 address, int block, int step) const {
        if constexpr (T::kCodes) {
            // Registers 0 and 1: 8 keys in two steps; 2 and 3: the next 8 keys.
            if constexpr (!T::kInt4) {
                if (step % 2 == 0) reader.read(held[block], address, 16 * block, 8 * step);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 pairs[2];
                if constexpr (T::kInt4) {
                    const u32 codes = reader.read(address, 16 * block + 8 * half, step);
                    Decoder<C.kv_dtype, C.dtype>::decode_four(codes, pairs);
                } else {
                    const u32 word = held[block][2 * half + step % 2];
                    decode_word<C, false, Exact>(word, pairs);
                    if constexpr (!Exact) note_nan<C>(word, nan);
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) regs[2 * half + i] = pairs[i];
            }
        } else {
            reader.read(regs, address, 16 * block, 16 * step);
        }
    }
};

// V as B, with Exact exact and times its rows' descales. The even columns of 16 codes are in the first n8
// block of the product, the odd ones in the second; of 32 codes of 4 bits every fourth column is in one of
// four.
template <Sm80FwdConfig C, bool Exact>
struct DividedV {
    using T = DividedTraits<C>;
    static constexpr int kBlocks = T::kOutputBlocks;
    using Held = u32[4];

    Held& held;  // the words of 16 keys in the last two blocks, or four
    KeyDescales descales;
    u32& nan;
    FragmentReader<typename T::V, Operand::BStoredKN, true> reader;

    __device__ __forceinline__ DividedV(Held& held, const float* descales, u32& nan)
        : held(held), descales{descales}, nan(nan) {}

    __device__ __forceinline__ void read(u32 (&regs)[4], u32 address, int block, int step) const {
        if constexpr (T::kCodes) {
            // Registers 0 and 1: 16 keys of the first 16 columns, or 32; 2 and 3: of the next.
            constexpr int kApart = per_byte(C.kv_dtype);
            if (block % (2 * kApart) == 0) reader.read(held, address, 16 * step, 8 * block / kApart);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 pairs[2];
                const u32 word = held[block / kApart % 2 * 2 + half];
                if constexpr (T::kInt4) {
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        pairs[i] = Decoder<C.kv_dtype, C.dtype>::int4_pair(word >> 4 * (block % 2 * 2 + i));
                } else {
                    decode_word<C, true, Exact>(word, pairs);
                    if constexpr (!Exact) note_nan<C>(word, nan);
                }
                const int key = 16 * step + 8 * half + lane_index() % 4 * 2;
                const float low = Exact ? descales.at(key) : 1.f, high = Exact ? descales.at(key + 1) : 1.f;
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    regs[2 * i + half] = Exact ? scale_pair<C.dtype>(pairs[i], low, high) : pairs[i];
            }
        } else {
            reader.read(regs, address, 16 * step, 16 * block);
        }
    }
};

// ---- A warp's tiles -----------------------------------------------------------------------------

// A warp's keys of K and V in the stages of shared memory.
template <Sm80FwdConfig C>
struct DividedTiles {
    using T = DividedTraits<C>;
    using Smem = DividedStorage<C>;
    static constexpr int kAhead = 2;  // 16 x 16 blocks of K or V read ahead of the products that use them

    WarpCopy<C, false> k;
    WarpCopy<C, true> v;
    u32 smem;
    int warp;
    int entry;  // of the page table, for the lane's key of the next tile to be copied

    template <class Seqlen>
    __device__ __forceinline__ static DividedTiles of(const FwdParams& params, const Seqlen& seqlen,
                                                      int batch, int kv_head, u32 smem) {
        return {WarpCopy<C, false>::of(params, seqlen, batch, kv_head),
                WarpCopy<C, true>::of(params, seqlen, batch, kv_head), smem, warp_index(), 0};
    }

    // Reads the table entry of the tile that begins with key `first`: start() uses it later, so that the read
    // stays in flight until then.
    __device__ __forceinline__ void read_entry(int first) {
        entry = k.rows.entry_of(k.key_of(first + warp * T::kKeys));
    }
    __device__ __forceinline__ void start(int stage, int first) const {
        const int own = first + warp * T::kKeys;
        k.start(smem + Smem::k_tile(stage, warp), smem + Smem::template descales<false>(stage, warp), own,
                entry);
        v.start(smem + Smem::v_tile(stage, warp), smem + Smem::template descales<true>(stage, warp), own,
                entry);
    }

    // S = Q K^T of the keys of `stage`.
    template <class Q>
    __device__ __forceinline__ void multiply_s(float (&s)[T::kRowBlocks][T::kKeys / 2], const Q& q,
                                               u32 smem_q, int stage) const {
        typename DividedK<C, false>::Held held;
        u32 nan = 0;
        auto multiply = [&](const auto& operand) {
            clear(s);
            warp_multiply<C.dtype, C.head_dim / 16, 0, kAhead>(s, q, smem_q, operand,
                                                               smem + Smem::k_tile(stage, warp));
        };
        multiply(DividedK<C, false>(held, nan));
        if (T::kCodes && any_nan<C>(nan)) multiply(DividedK<C, true>(held, nan));
        if (T::kCodes && k.rows.descales != nullptr) scale_keys(s, descales<false>(stage));
    }

    // O += P V of the keys of `stage`; `p` reads P from `s`.
    template <class P>
    __device__ __forceinline__ void multiply_o(float (&o)[T::kRowBlocks][C.head_dim_v / 2], const P& p,
                                               float (&s)[T::kRowBlocks][T::kKeys / 2], int stage) const {
        typename DividedV<C, false>::Held held;
        u32 nan = 0;
        auto multiply = [&](const auto& operand) {
            warp_multiply<C.dtype, T::kKeys / 16, 0, kAhead>(o, p, 0, operand,
                                                             smem + Smem::v_tile(stage, warp));
        };
        // Descales of rows are factors of P, which f16 would not hold.
        constexpr bool kScalesP = T::kCodes && C.dtype == Dtype::Bf16;
        const bool scales = v.rows.descales != nullptr;
        bool exact = scales && !kScalesP;
        if (!exact) {
            if (kScalesP && scales) scale_keys(s, descales<true>(stage));
            multiply(DividedV<C, false>(held, nullptr, nan));
            // NaN makes its column of O NaN in all rows, whatever P is: 0 leaves the others as they are.
            exact = any_nan<C>(nan);
            if (exact) clear(s);
        }
        if (T::kCodes && exact)
            multiply(DividedV<C, true>(held, kScalesP ? nullptr : descales<true>(stage), nan));
    }

  private:
    // Multiplies the scores, or probabilities, of each key by its descale.
    __device__ __forceinline__ static void scale_keys(float (&s)[T::kRowBlocks][T::kKeys / 2],
                                                      const float* of_keys) {
        const float* const own = of_keys + lane_index() % 4 * 2;
#pragma unroll
        for (int block = 0; block < T::kKeys / 8; ++block) {
            const float2 factors = *reinterpret_cast<const float2*>(own + 8 * block);
#pragma unroll
            for (int f = 0; f < T::kRowBlocks; ++f) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    s[f][4 * block + 2 * r] *= factors.x;
                    s[f][4 * block + 2 * r + 1] *= factors.y;
                }
            }
        }
    }

    __device__ __forceinline__ static void clear(float (&s)[T::kRowBlocks][T::kKeys / 2]) {
#pragma unroll
        for (int f = 0; f < T::kRowBlocks; ++f) {
#pragma unroll
            for (float& score : s[f]) score = 0.f;
        }
    }

    __device__ __forceinline__ static const u8* bytes() { return shared_memory<Smem>().bytes; }

    // Those of the warp's keys in `stage`; null for none.
    template <bool Values>
    __device__ __forceinline__ const float* descales(int stage) const {
        if ((Values ? v.rows.descales : k.rows.descales) == nullptr) return nullptr;
        return reinterpret_cast<const float*>(bytes() + Smem::template descales<Values>(stage, warp));
    }
};

// ---- Combining ----------------------------------------------------------------------------------

// Combines the warps' results: `rows` becomes those of all keys in every warp, and `output` the warp's blocks
// of O, relative to the common maximum. `o` has columns apart as DividedV says if they are of codes.
template <Sm80FwdConfig C, class RowState>
__device__ __forceinline__ void combine_warps(
    u8* smem, const float (&o)[DividedTraits<C>::kRowBlocks][C.head_dim_v / 2],
    RowState (&rows)[DividedTraits<C>::kRowBlocks],
    float (&output)[DividedTraits<C>::kRowBlocks][8 * DividedTraits<C>::kOwnBlocks]) {
    using T = DividedTraits<C>;
    using Smem = DividedStorage<C>;
    const int lane = lane_index(), warp = warp_index(), row = lane / 4, four = lane % 4;
    float* const results = reinterpret_cast<float*>(smem + Smem::kResults);
    float* const maxima = reinterpret_cast<float*>(smem + Smem::kMaxima);
    float* const sums = maxima + C.num_warps * C.tile_m;
    cta_sync();  // all stages have been read
#pragma unroll
    for (int f = 0; f < T::kRowBlocks; ++f) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int own = warp * C.tile_m + 16 * f + 8 * r + row;
            float* const to = results + own * Smem::kOutputRow;
#pragma unroll
            for (int block = 0; block < T::kOutputBlocks; ++block) {
                const float* const from = o[f] + 8 * block + 2 * r;
                if constexpr (T::kInt4) {
                    float* const at = to + block / 2 * 32 + 8 * four + block % 2 * 2;
                    *reinterpret_cast<float2*>(at) = {from[0], from[4]};
                    *reinterpret_cast<float2*>(at + 4) = {from[1], from[5]};
                } else if constexpr (T::kCodes) {
                    *reinterpret_cast<float4*>(to + 16 * block + 4 * four) = {from[0], from[4], from[1],
                                                                              from[5]};
                } else {
                    *reinterpret_cast<float2*>(to + 16 * block + 2 * four) = {from[0], from[1]};
                    *reinterpret_cast<float2*>(to + 16 * block + 8 + 2 * four) = {from[4], from[5]};
                }
            }
            const float sum = quad_sum(rows[f].sum[r]);
            if (four == 0) {
                maxima[own] = rows[f].max[r];
                sums[own] = sum;
            }
        }
    }
    cta_sync();
#pragma unroll
    for (int f = 0; f < T::kRowBlocks; ++f) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int own = 16 * f + 8 * r + row;
            float largest = maxima[own];
#pragma unroll
            for (int i = 1; i < C.num_warps; ++i) largest = fmaxf(largest, maxima[i * C.tile_m + own]);
            float total = 0.f;
#pragma unroll
            for (int i = 0; i < 4 * T::kOwnBlocks; ++i) output[f][i / 2 * 4 + 2 * r + i % 2] = 0.f;
#pragma unroll
            for (int i = 0; i < C.num_warps; ++i) {
                const float factor = RowState::exponential(maxima[i * C.tile_m + own] - largest);
                total = fmaf(sums[i * C.tile_m + own], factor, total);
                const float* const from = results + (i * C.tile_m + own) * Smem::kOutputRow + 2 * four;
#pragma unroll
                for (int block = 0; block < 2 * T::kOwnBlocks; ++block) {
                    const int n8 = warp * 2 * T::kOwnBlocks + block;
                    if (T::kOutputBlocks % C.num_warps != 0 && n8 >= 2 * T::kOutputBlocks) break;
                    const float2 part = *reinterpret_cast<const float2*>(from + 8 * n8);
                    float* const sum = output[f] + 4 * block + 2 * r;
                    sum[0] = fmaf(part.x, factor, sum[0]);
                    sum[1] = fmaf(part.y, factor, sum[1]);
                }
            }
            rows[f].max[r] = largest;
            rows[f].sum[r] = four == 0 ? total : 0.f;
        }
    }
}

}  // namespace fa::sm80
