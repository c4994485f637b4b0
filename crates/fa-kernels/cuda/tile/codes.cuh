// Tiles of a cache of codes, of 8 bits (e4m3, e5m2, int8) or of 4 (int4, two to a byte): copied to shared
// memory as they are, then converted to the tiles of 16-bit elements that products read.
#pragma once
#include "attn/store_rows.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/multiply.cuh"
#include "ptx/packed.cuh"
#include "tile/panel.cuh"
#include "types.cuh"

namespace fa {

// Whether elements of the type are codes.
__host__ __device__ constexpr bool is_code(Dtype dtype) {
    return dtype == Dtype::E4m3 || dtype == Dtype::E5m2 || dtype == Dtype::Int8 || dtype == Dtype::Int4;
}

// Codes in a byte.
__host__ __device__ constexpr int per_byte(Dtype dtype) { return dtype == Dtype::Int4 ? 2 : 1; }

// Codes as numbers of type T, all of which are exact, NaN included.
template <Dtype Code, Dtype T>
struct Decoder {
    static_assert(is_code(Code) && (T == Dtype::F16 || T == Dtype::Bf16));
    static constexpr bool kF16 = T == Dtype::F16;
    static constexpr bool kConverts = kF16 && kConvertsE4m3;
    // Whether decode_pairs() gives +-480 for NaN of e4m3, and 2^16 and more for what is not finite in e5m2.
    static constexpr bool kHidesNan = Code == Dtype::E4m3 ? !kConverts : Code == Dtype::E5m2 && !kF16;
    enum { kVecs = 2 * per_byte(Code) };  // of numbers, in 16 bytes of codes

    // The codes of a word as two pairs of numbers: the lower and the upper two, or with Apart the even and
    // the odd.
    template <bool Apart>
    __device__ __forceinline__ static void decode_pairs(u32 word, u32 (&values)[2]) {
        if constexpr (Code == Dtype::Int8) {
            decode_int8(Apart ? bytes_of<0x3120>(word, 0) : word, values);
        } else if constexpr (Code == Dtype::E5m2 && kF16) {
            // The upper byte of f16.
            values[0] = bytes_of<Apart ? 0x2404 : 0x1404>(word, 0);
            values[1] = bytes_of<Apart ? 0x3414 : 0x3424>(word, 0);
        } else if constexpr (kConverts) {
            const u32 ordered = Apart ? bytes_of<0x3120>(word, 0) : word;
            values[0] = f16_of_e4m3(u16(ordered));
            values[1] = f16_of_e4m3(u16(ordered >> 16));
        } else {
            // The byte above a code is its sign, eight times. Shifted, sign, exponent and mantissa are in
            // their places in T, 2^(bias of T - bias of the code) too small.
            constexpr bool kWide = Code == Dtype::E5m2;
            constexpr int kShift = kF16 ? 7 : kWide ? 5 : 4;
            constexpr u32 kPlaces = kF16 ? 0xbf80bf80 : kWide ? 0x8fe08fe0 : 0x87f087f0;
            constexpr u32 kFactor = kF16 ? 0x5c005c00 : kWide ? 0x77807780 : 0x7b807b80;  // 2^8, 2^112, 2^120
            constexpr u32 kNothing = 0x80008000;                                          // -0
            const u32 extended[2] = {signed_bytes_of<Apart ? 0xa280 : 0x9180>(word),
                                     signed_bytes_of<Apart ? 0xb391 : 0xb3a2>(word)};
#pragma unroll
            for (int i = 0; i < 2; ++i)
                values[i] = fma_packed<T>(extended[i] << kShift & kPlaces, kFactor, kNothing);
        }
    }

    __device__ __forceinline__ static void decode_int8(u32 word, u32 (&values)[2]) {
        if constexpr (kF16) {
            // 1024 + (code + 128), less 1152.
            const u32 shifted = word ^ 0x80808080;
            values[0] = fma_packed<T>(bytes_of<0x4140>(shifted, 0x64646464), 0x3c003c00, 0xe480e480);
            values[1] = fma_packed<T>(bytes_of<0x4342>(shifted, 0x64646464), 0x3c003c00, 0xe480e480);
        } else {
            // 128 + the lower seven bits, less 128, or 256 for a negative code.
            const u32 lower[2] = {bytes_of<0x4140>(word, 0), bytes_of<0x4342>(word, 0)};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                values[i] = fma_packed<T>(lower[i] & 0x007f007f | 0x43004300, 0x3f803f80,
                                          lower[i] & 0x00800080 | 0xc300c300);
            }
        }
    }

    // The numbers of the int4 codes in the lowest four bits of each half of a word.
    __device__ __forceinline__ static u32 int4_pair(u32 word) {
        // 2^10 or 2^7 + (code + 8), less 2^10 or 2^7 + 8.
        constexpr u32 kShifted = kF16 ? 0x64086408 : 0x43084308;
        constexpr u32 kOne = kF16 ? 0x3c003c00 : 0x3f803f80;
        return fma_packed<T>((word & 0x000f000f) ^ kShifted, kOne, kShifted | 0x80008000);
    }
    // The eight int4 codes of a word, in order.
    __device__ __forceinline__ static void decode_int4(u32 word, u32 (&values)[4]) {
        // Codes 0, 2 and 1, 3 in the bytes of the halves of the first; 4, 6 and 5, 7 in those of the second.
        const u32 next = word >> 4;
        const u32 halves[2] = {bytes_of<0x5410>(word, next), bytes_of<0x7632>(word, next)};
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = int4_pair(halves[i / 2] >> 8 * (i % 2));
    }
    // The four int4 codes of the lower half of a word, whose upper half is 0, in order.
    __device__ __forceinline__ static void decode_four(u32 half, u32 (&values)[2]) {
        const u32 apart = half | half << 12;
        values[0] = int4_pair(apart);
        values[1] = int4_pair(apart >> 8);
    }

    // The least of the codes that decode_pairs() hides, less 0x80, in each byte.
    static constexpr u32 kHidden = Code == Dtype::E5m2 ? 0x04040404 : 0x01010101;

    // Whether a code of a word is one of these: the top bit of a byte is then set. (Others may be, too.)
    __device__ __forceinline__ static u32 changed_signs(u32 word) { return word + kHidden ^ word; }
    // The top bit of each byte of a word: whether its code is NaN, or in e5m2 infinite.
    __device__ __forceinline__ static u32 nan_bits(u32 word) {
        return (word & 0x7f7f7f7f) + kHidden & 0x80808080;
    }
    // Makes NaN, or infinities, of the numbers of decode_pairs() whose codes have a bit in nan_bits().
    template <bool Apart>
    __device__ __forceinline__ static void add_nan(u32 bits, u32 (&values)[2]) {
        values[0] = with_nan(values[0], bytes_of<Apart ? 0x2404 : 0x1404>(bits, 0));
        values[1] = with_nan(values[1], bytes_of<Apart ? 0x3414 : 0x3424>(bits, 0));
    }

    // Sixteen bytes of codes, in order. Whether one of them was NaN is added to `nan`; it comes out as NaN if
    // KeepsNan.
    template <bool KeepsNan>
    __device__ __forceinline__ static void decode(const Vec16& codes, Vec16 (&values)[kVecs], u32& nan) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (Code == Dtype::Int4) {
                decode_int4(codes.words[i], values[i].words);
            } else {
                u32 pairs[2];
                decode_pairs<false>(codes.words[i], pairs);
                if constexpr (kHidesNan) {
                    const u32 bits = nan_bits(codes.words[i]);
                    nan |= bits;
                    if constexpr (KeepsNan) add_nan<false>(bits, pairs);
                }
                values[i / 2].words[i % 2 * 2] = pairs[0];
                values[i / 2].words[i % 2 * 2 + 1] = pairs[1];
            }
        }
    }

  private:
    // Sets the exponents of two numbers whose codes' NaN bits are the top bits of the halves.
    __device__ __forceinline__ static u32 with_nan(u32 values, u32 bits) {
        return values | bits - (bits >> (kF16 ? 5 : 8));
    }
};

// Multiplies two numbers by a descale each, in f32, and rounds the products.
template <Dtype T>
__device__ __forceinline__ u32 scale_pair(u32 pair, float low, float high) {
    return pack<T>(unpack_low<T>(pair) * low, unpack_high<T>(pair) * high);
}

// A place in a cache, in units of 16 bytes, that is of no row: its codes are zeros.
__device__ constexpr u32 kNowhere = ~0u;

// Copies and converts `Rows` rows of a Tile, whose codes are `PerByte` in a byte, by `Threads` threads. Each
// thread converts the 16 bytes that it has copied itself; as many neighbouring lanes as a panel has units
// copy those of a row. A stage of shared memory has [panel][row][lane] units.
template <class Tile, int Rows, int Threads, int PerByte = 1>
struct CodeTile {
    enum { kNumbers = 16 * PerByte };  // in a unit
    static constexpr int kPanel = widest_panel(Tile::kColumns);
    static constexpr int kPanels = Tile::kColumns / kPanel;
    static constexpr int kLanes = kPanel / kNumbers;
    static constexpr int kSweep = Threads / kLanes;  // rows copied at once
    static constexpr int kSweeps = ceil_div(Rows, kSweep);
    static constexpr int kBytes = Rows * Tile::kColumns / PerByte;
    static_assert(kSweep % 8 == 0, "the swizzle repeats every 8 rows");

    // The row of a thread in a sweep, within the rows of the tile.
    __device__ __forceinline__ static int row(int thread, int sweep) {
        return thread / kLanes + sweep * kSweep;
    }
    __device__ __forceinline__ static bool has_row(int thread, int sweep) {
        return Rows % kSweep == 0 || sweep + 1 < kSweeps || row(thread, sweep) < Rows;
    }
    // The stage's offset of a thread's unit.
    __device__ __forceinline__ static u32 unit(int thread, int sweep, int panel) {
        return panel * (Rows * kPanel / PerByte) + (thread + sweep * Threads) * 16;
    }

    // Starts to copy rows to `stage`. `at(sweep)` is the place of the thread's row, relative to `first`. Rows
    // have `row_bytes` bytes of codes; other columns become zeros.
    template <class At>
    __device__ __forceinline__ static void start(u32 stage, int thread, const u8* first, int row_bytes,
                                                 const At& at) {
        const int column = thread % kLanes * 16;
#pragma unroll
        for (int sweep = 0; sweep < kSweeps; ++sweep) {
            if (!has_row(thread, sweep)) break;
            const u32 place = at(sweep);
            const bool exists = place != kNowhere;
            const u8* const from = bytes_after(first, exists ? place : 0, 16) + column;
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
                const int before = panel * (kPanel / PerByte);
                const int bytes = exists ? max(0, min(row_bytes - before - column, 16)) : 0;
                cp_async_16(stage + unit(thread, sweep, panel), from + before, bytes);
            }
        }
    }

    // Converts the thread's units of `stage`, which have arrived, to the tile at `tile`. The numbers of a row
    // are multiplied by the row's of `factors`, unless that is null.
    template <Dtype Code, Dtype T>
    __device__ __forceinline__ static void convert(const u8* stage, u8* tile, int thread,
                                                   const float* factors) {
        if (factors != nullptr) {
            convert_units<Code, T, 1, true, true>(stage, tile, thread, factors);
        } else if (convert_units<Code, T, kAtOnce, false, false>(stage, tile, thread, factors) != 0) {
            convert_units<Code, T, 1, true, false>(stage, tile, thread, factors);
        }
    }

    // Sweeps whose units are converted side by side, which hides the latency of each step: about four units
    // of 16 numbers.
    static constexpr int kAtOnce = max_of(1, min_of(kSweeps, 4 / PerByte / kPanels));
    // Panels of a sweep: of wide rows not all.
    static constexpr int kPanelsAtOnce = kPanels > 4 ? 2 : kPanels;

    // The same of `AtOnce` sweeps at once; returns not 0 if a code is NaN, and does not come out as NaN.
    template <Dtype Code, Dtype T, int AtOnce, bool KeepsNan, bool Scales>
    __device__ __forceinline__ static u32 convert_units(const u8* stage, u8* tile, int thread,
                                                        const float* factors) {
        const int column = thread % kLanes * kNumbers;
        // Of 32 numbers the last two chunks lie as the first two, by a swizzle that leaves their distance.
        const u32 first[2] = {Tile::offset(thread / kLanes, column),
                              Tile::offset(thread / kLanes, column + 8)};
        u32 nan = 0;
#pragma unroll AtOnce
        for (int sweep = 0; sweep < kSweeps; ++sweep) {
            if (!has_row(thread, sweep)) break;
#pragma unroll kPanelsAtOnce
            for (int panel = 0; panel < kPanels; ++panel) {
                Vec16 values[2 * PerByte];
                const Vec16 codes = *reinterpret_cast<const Vec16*>(stage + unit(thread, sweep, panel));
                Decoder<Code, T>::template decode<KeepsNan>(codes, values, nan);
#pragma unroll
                for (int i = 0; i < 2 * PerByte; ++i) {
                    if constexpr (Scales) {
                        const float factor = factors[row(thread, sweep)];
#pragma unroll
                        for (u32& pair : values[i].words) pair = scale_pair<T>(pair, factor, factor);
                    }
                    *reinterpret_cast<Vec16*>(tile + (first[i % 2] ^ i / 2 * 32) +
                                              sweep * kSweep * Tile::kRowBytes +
                                              Tile::panel_offset(panel * kPanel)) = values[i];
                }
            }
        }
        return nan;
    }
};

}  // namespace fa
