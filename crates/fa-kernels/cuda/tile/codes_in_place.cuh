// Codes of a cache in the tile of 16-bit numbers that they become: a row's codes are copied to where some of
// its numbers will lie, and converted in place.
#pragma once
#include "attn/store_rows.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/multiply.cuh"
#include "ptx/packed.cuh"
#include "tile/codes.cuh"
#include "types.cuh"

namespace fa {

// Two numbers of Decoder::decode_pairs(), with NaN, and infinities of e5m2, where their codes are: on the FMA
// units, which have less to do than those of bits.
template <Dtype Code, Dtype T>
__device__ __forceinline__ u32 with_nonfinite(u32 pair) {
    if constexpr (!Decoder<Code, T>::kHidesNan) {
        return pair;
    } else {
        static_assert(T == Dtype::Bf16);
        constexpr u32 kNothing = 0x80008000;  // -0
        // The product with 1.09375 * 2^119 or 1.75 * 2^111 is infinite for NaN alone, of e4m3 480 and of e5m2
        // 1.25 * 2^16 or more. Infinity times 0 is NaN.
        constexpr u32 kLeavesNan = Code == Dtype::E4m3 ? 0x7b0c7b0c : 0x77607760;
        const u32 own = fma_packed<T>(fma_packed<T>(pair, kLeavesNan, kNothing), 0, pair);
        if constexpr (Code == Dtype::E4m3) {
            return own;
        } else {
            // 2^16 overflows.
            return fma_packed<T>(fma_packed<T>(own, 0x77807780, kNothing), 0x07800780, kNothing);
        }
    }
}

// Copies and converts the rows of a Tile, whose codes are `PerByte` in a byte, by `Threads` threads. A unit
// of 16 bytes of codes lies in the first of the chunks that its numbers take. One thread copies it, reads it
// and writes these chunks, so that no thread waits for another. As many neighbouring lanes as a panel has
// units share a row.
template <class Tile, int Threads, int PerByte>
struct CodesInPlace {
    enum { kNumbers = 16 * PerByte, kChunks = 2 * PerByte };  // of a unit
    static constexpr int kPanels = Tile::kColumns / Tile::kPanel;
    static constexpr int kLanes = Tile::kPanel / kNumbers;
    static constexpr int kSweep = Threads / kLanes;  // rows at once
    static constexpr int kSweeps = ceil_div(Tile::kRows, kSweep);
    static constexpr int kSweepBytes = kSweep * Tile::kRowBytes;
    static_assert(kSweep % 8 == 0, "the swizzle repeats every 8 rows");
    static_assert(Tile::kRows % kSweep == 0 || Tile::kRows < kSweep);

    // Panels whose codes are read while those before are converted: about 64 codes in registers.
    static constexpr int kFour = 4 / PerByte;
    static constexpr int kGroup = kPanels % 3 == 0 ? 3 : kPanels % kFour == 0 ? kFour : 1;
    static constexpr int kGroups = kPanels / kGroup;

    // The row of a thread in a sweep.
    __device__ __forceinline__ static int row(int thread, int sweep) {
        return thread / kLanes + sweep * kSweep;
    }
    __device__ __forceinline__ static bool has_rows(int thread) {
        return kSweep <= Tile::kRows || row(thread, 0) < Tile::kRows;
    }

    // Starts to copy rows to `tile`. `at(sweep)` is the place of the thread's row, relative to `first`. Rows
    // have `row_bytes` bytes of codes; other columns become zeros.
    template <class At>
    __device__ __forceinline__ static void start(u32 tile, int thread, const u8* first, int row_bytes,
                                                 const At& at) {
        if (!has_rows(thread)) return;
        const int column = thread % kLanes * 16;
        const u32 own = tile + Tile::offset(row(thread, 0), thread % kLanes * kNumbers);
#pragma unroll
        for (int sweep = 0; sweep < kSweeps; ++sweep) {
            const u32 place = at(sweep);
            const bool exists = place != kNowhere;
            const u8* const from = bytes_after(first, exists ? place : 0, 16) + column;
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
                const int before = panel * (Tile::kPanel / PerByte);
                const int bytes = exists ? max(0, min(row_bytes - before - column, 16)) : 0;
                cp_async_16(own + sweep * kSweepBytes + panel * Tile::kPanelBytes, from + before, bytes);
            }
        }
    }

    // Converts the thread's units, which have arrived. With Scales the numbers of a row are multiplied by one
    // of `factors`: those of K's rows, and behind them those of V's for the first `ValuePanels` panels.
    template <Dtype Code, Dtype T, int ValuePanels, bool Scales>
    __device__ __forceinline__ static void convert(u8* tile, int thread, const float* factors) {
        if (!has_rows(thread)) return;
        const int column = thread % kLanes * kNumbers;
        // Of 32 numbers the last two chunks lie as the first two, by a swizzle that leaves their distance.
        u8* const chunks[2] = {tile + Tile::offset(row(thread, 0), column),
                               tile + Tile::offset(row(thread, 0), column + 8)};
        u8* const later[2] = {tile + (Tile::offset(row(thread, 0), column) ^ 32),
                              tile + (Tile::offset(row(thread, 0), column + 8) ^ 32)};
        Vec16 next[kGroup];
        auto read = [&](int at) {
#pragma unroll
            for (int i = 0; i < kGroup; ++i)
                next[i] = *reinterpret_cast<const Vec16*>(chunks[0] + at + i * Tile::kPanelBytes);
        };
        read(0);
#pragma unroll 1
        for (int sweep = 0; sweep < kSweeps; ++sweep) {
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                Vec16 codes[kGroup];
#pragma unroll
                for (int i = 0; i < kGroup; ++i) codes[i] = next[i];
                const int at = sweep * kSweepBytes + group * kGroup * Tile::kPanelBytes;
                if (group + 1 < kGroups) {
                    read(at + kGroup * Tile::kPanelBytes);
                } else if (sweep + 1 < kSweeps) {
                    read((sweep + 1) * kSweepBytes);
                }
#pragma unroll
                for (int i = 0; i < kGroup; ++i) {
                    const int panel = group * kGroup + i;
                    Vec16 values[kChunks];
                    decode<Code, T>(codes[i], values);
                    if constexpr (Scales) {
                        const float factor =
                            factors[(panel < ValuePanels ? Tile::kRows : 0) + row(thread, sweep)];
#pragma unroll
                        for (Vec16& chunk : values)
#pragma unroll
                            for (u32& pair : chunk.words) pair = scale_pair<T>(pair, factor, factor);
                    }
#pragma unroll
                    for (int chunk = 0; chunk < kChunks; ++chunk) {
                        u8* const to = chunk < 2 ? chunks[chunk % 2] : later[chunk % 2];
                        *reinterpret_cast<Vec16*>(to + at + i * Tile::kPanelBytes) = values[chunk];
                    }
                }
            }
        }
    }

  private:
    // The numbers of a unit, in order.
    template <Dtype Code, Dtype T>
    __device__ __forceinline__ static void decode(const Vec16& codes, Vec16 (&values)[kChunks]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (Code == Dtype::Int4) {
                Decoder<Code, T>::decode_int4(codes.words[i], values[i].words);
            } else {
                u32 pairs[2];
                Decoder<Code, T>::template decode_pairs<false>(codes.words[i], pairs);
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    values[i / 2].words[i % 2 * 2 + j] = with_nonfinite<Code, T>(pairs[j]);
            }
        }
    }
};

}  // namespace fa
