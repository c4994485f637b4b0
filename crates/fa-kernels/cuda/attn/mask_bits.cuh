// What a mask's program leaves to be seen of tiles that are neither empty nor full: a bit for each score, in
// the order of the registers that hold them. A kernel evaluates the program for them once, for all heads that
// share a map, before the main kernel reads them. The bits of a list's tiles lie behind its entries: of its
// first `kept` tiles, of forwards of its last. Of further tiles the main kernel evaluates the program.
#pragma once
#include "attn/block_list.cuh"
#include "attn/programs.cuh"
#include "ptx/math.cuh"
#include "ptx/special.cuh"
#include "types.cuh"

namespace fa {

// The bits of a thread's scores in a tile, of `Blocks` times `N` registers.
template <int N, int Blocks, int Threads>
struct MaskBits {
    static constexpr int kWords = (Blocks * N + 31) / 32;
    u32 words[kWords];
    bool masks, are_kept;

    // Those of the tile that is the `place`-th to have bits, of a list of at most `most`.
    __device__ __forceinline__ void read(const BlockMapParams& map, const u32* list, int most, int place,
                                         bool full, int thread) {
        masks = !full;
        are_kept = masks && place < map.kept;
        if (!are_kept) return;
        const u32* from = list + words_to(most, place, thread);
#pragma unroll
        for (int w = 0; w < kWords; ++w)
            words[w] = load_u32_here<0>(reinterpret_cast<const u8*>(from + w * Threads));
    }

    // Hides scores of block `b`, which lies at `place`.
    template <class Place>
    __device__ __forceinline__ void hide(float (&s)[N], int b, const ProgramParams& programs,
                                         const Place& place) {
        if (!masks) return;
        if (!are_kept) find_in_turn(programs, place, b);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int bit = b * N + i;
            s[i] = (words[bit / 32] >> bit % 32 & 1) != 0 ? s[i] : minus_infinity();
        }
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[w] = 0;
    }
    // Evaluates the mask of block `b`.
    template <class Place>
    __device__ __forceinline__ void find(const ProgramParams& programs, const Place& place, int b) {
        place.template for_each<N>(programs,
                                   [&](int i, const auto& mods, const auto& row, const auto& column) {
                                       const int bit = b * N + i;
                                       words[bit / 32] |= u32(mods.mask(row, column)) << bit % 32;
                                   });
    }
    __device__ __forceinline__ void write(u32* list, int most, int place, int thread) const {
        u32* to = list + words_to(most, place, thread);
#pragma unroll
        for (int w = 0; w < kWords; ++w) to[w * Threads] = words[w];
    }

  private:
    // From the beginning of a list to the bits of a thread.
    __device__ __forceinline__ static int words_to(int most, int place, int thread) {
        return list_entries(most) + place * (kWords * Threads) + thread;
    }

    // The same score by score, where registers are scarce.
    template <class Place>
    __device__ __forceinline__ void find_in_turn(const ProgramParams& programs, const Place& place, int b) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            const int begin = max_of(32 * w - b * N, 0), end = min_of(32 * w + 32 - b * N, N);
            if (begin >= end) continue;
            u32 word = begin == 0 && b * N % 32 != 0 ? words[w] : 0;
            place.in_turn(programs, begin, end,
                          [&](int i, const auto& mods, const auto& row, const auto& column) {
                              word |= u32(mods.mask(row, column)) << (b * N + i) % 32;
                          });
            words[w] = word;
        }
    }
};

}  // namespace fa
