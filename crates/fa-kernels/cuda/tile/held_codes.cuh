// Codes of a cache on their way to a tile of 16-bit numbers: a thread holds those of some of its rows in
// registers, from before the tile is free until their numbers are stored.
#pragma once
#include "attn/store_rows.cuh"
#include "config.cuh"
#include "ptx/math.cuh"
#include "ptx/warp.cuh"
#include "tile/codes.cuh"
#include "types.cuh"

namespace fa {

// The codes of `Threads` threads for the rows of a Tile, `PerByte` in a byte. A thread has the same unit of
// 16 codes of each panel of its rows; four neighbouring lanes share a row.
template <class Tile, int Threads, int PerByte>
struct HeldCodes {
    static constexpr int kWords = 4 / PerByte, kUnit = 4 * kWords;  // of a unit: words, and bytes
    static constexpr int kPanels = Tile::kColumns / Tile::kPanel;
    static constexpr int kLanes = Tile::kPanel / 16;
    static constexpr int kSweep = Threads / kLanes;  // rows at once
    static constexpr int kSweeps = ceil_div(Tile::kRows, kSweep);
    static constexpr int kSweepBytes = kSweep * Tile::kRowBytes;
    static_assert(kSweep % 8 == 0, "the swizzle repeats every 8 rows");
    static_assert(Tile::kRows % kSweep == 0 || Tile::kRows < kSweep);

    // Rows of a thread that are held at once, of at most 18 units, and how often a tile takes so many.
    static constexpr int kMostUnits = 18;
    static constexpr int kFit = 4 * kPanels <= kMostUnits ? 4 : 2 * kPanels <= kMostUnits ? 2 : 1;
    static constexpr int kHeld = min_of(kFit, kSweeps);
    static constexpr int kParts = kSweeps / kHeld;
    static constexpr int kPartBytes = kHeld * kSweepBytes;

    struct alignas(kUnit) Unit {
        u32 words[kWords];
    };
    Unit units[kHeld][kPanels];

    // The row, in the tile, of a thread's `i`-th of a part.
    __device__ __forceinline__ static int row(int thread, int part, int i) {
        return thread / kLanes + (part * kHeld + i) * kSweep;
    }
    __device__ __forceinline__ static bool has_rows(int thread) {
        return kSweep <= Tile::kRows || thread / kLanes < Tile::kRows;
    }

    // Loads the thread's units of panels [First, First + Count) of row `i`, whose codes lie from `from` on,
    // `row_bytes` of them, or none. Other columns are zeros. `Whole`: the row ends with a unit.
    template <int First, int Count, bool Whole>
    __device__ __forceinline__ void load(int i, const u8* from, bool exists, int row_bytes, int thread) {
        const int column = thread % kLanes * kUnit;
        const int left = exists ? row_bytes - column : 0;
#pragma unroll
        for (int panel = 0; panel < Count; ++panel) {
            const int before = panel * kLanes * kUnit;
            const u8* const unit = from + column + before;
            Unit& to = units[i][First + panel];
            if constexpr (Whole) {
                to = left > before ? *reinterpret_cast<const Unit*>(unit) : Unit{};
            } else {
#pragma unroll
                for (int j = 0; j < kWords; ++j)
                    to.words[j] = left > before + 4 * j ? *reinterpret_cast<const u32*>(unit + 4 * j) : 0;
            }
        }
    }

    // Whether a code is hidden by Decoder::decode_pairs().
    template <Dtype Code, Dtype T>
    __device__ __forceinline__ bool hides() const {
        u32 bits = 0;
        if constexpr (Decoder<Code, T>::kHidesNan) {
#pragma unroll
            for (const auto& row : units)
#pragma unroll
                for (const Unit& unit : row)
#pragma unroll
                    for (const u32 word : unit.words) bits |= Decoder<Code, T>::changed_signs(word);
        }
        return (bits & 0x80808080) != 0;
    }

    // Stores the numbers of codes that are all shown to a part of a tile, which begins at `tile`.
    template <Dtype Code, Dtype T>
    __device__ __forceinline__ void convert(u8* tile, int thread) const {
        const Places places(tile, thread);
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
                Vec16 values[2];
                decode<Code, T, false>(units[i][panel].words, values);
#pragma unroll
                for (int chunk = 0; chunk < 2; ++chunk) places.at(i, panel, chunk) = values[chunk];
            }
            // Keeps a row's numbers out of the registers of the row before.
            warp_sync();
        }
    }

    // The same of any codes, which lie in the tile until they are converted. Numbers are multiplied by
    // `factor(i, panel)`.
    template <Dtype Code, Dtype T, class Factor>
    __device__ __forceinline__ void convert_any(u8* tile, int thread, const Factor& factor) const {
        // Panels that are converted side by side.
        constexpr int kGroup = kPanels % 3 == 0 ? 3 : kPanels % 2 == 0 ? 2 : 1;
        const Places places(tile, thread);
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
                Vec16 held{};
#pragma unroll
                for (int j = 0; j < kWords; ++j) held.words[j] = units[i][panel].words[j];
                places.at(i, panel, 0) = held;
            }
        }
#pragma unroll 1
        for (int i = 0; i < kHeld; ++i) {
#pragma unroll 1
            for (int first = 0; first < kPanels; first += kGroup) {
                Vec16 codes[kGroup];
#pragma unroll
                for (int j = 0; j < kGroup; ++j) codes[j] = places.at(i, first + j, 0);
#pragma unroll
                for (int j = 0; j < kGroup; ++j) {
                    Vec16 values[2];
                    decode<Code, T, true>(codes[j].words, values);
                    const float own = factor(i, first + j);
#pragma unroll
                    for (int chunk = 0; chunk < 2; ++chunk) {
#pragma unroll
                        for (u32& pair : values[chunk].words) pair = scale_pair<T>(pair, own, own);
                        places.at(i, first + j, chunk) = values[chunk];
                    }
                }
            }
        }
    }

  private:
    // Where the numbers of a thread's unit of the first panel lie in a tile: two chunks.
    struct Places {
        u8* chunks[2];

        __device__ __forceinline__ Places(u8* tile, int thread) {
            const int column = thread % kLanes * 16, row = thread / kLanes;
            chunks[0] = tile + Tile::offset(row, column);
            chunks[1] = tile + Tile::offset(row, column + 8);
        }
        __device__ __forceinline__ Vec16& at(int i, int panel, int chunk) const {
            return *reinterpret_cast<Vec16*>(chunks[chunk] + i * kSweepBytes + panel * Tile::kPanelBytes);
        }
    };

    // The numbers of a unit, in order. With KeepsHidden hidden codes are what they are.
    template <Dtype Code, Dtype T, bool KeepsHidden, class Words>
    __device__ __forceinline__ static void decode(const Words& words, Vec16 (&values)[2]) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            if constexpr (Code == Dtype::Int4) {
                Decoder<Code, T>::decode_int4(words[i], values[i].words);
            } else {
                u32 pairs[2];
                Decoder<Code, T>::template decode_pairs<false>(words[i], pairs);
                if constexpr (KeepsHidden && Decoder<Code, T>::kHidesNan)
                    Decoder<Code, T>::template add_nan<false>(Decoder<Code, T>::nan_bits(words[i]), pairs);
                values[i / 2].words[i % 2 * 2] = pairs[0];
                values[i / 2].words[i % 2 * 2 + 1] = pairs[1];
            }
        }
    }
};

}  // namespace fa
