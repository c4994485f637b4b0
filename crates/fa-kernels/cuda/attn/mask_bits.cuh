// What a mask's program leaves to be seen of tiles that are neither empty nor full: a bit for each score, in
// the order of the registers that hold them. A kernel evaluates the program for them once, for all heads that
// share a map, before the main kernel reads them. The bits of a list's tiles lie behind its entries: of its
// first `kept` tiles, of forwards of its last. Of further tiles the main kernel evaluates the program.
#pragma once
#include "attn/block_list.cuh"
#include "attn/programs.cuh"
#include "ptx/math.cuh"
#include "ptx/special.cuh"
#include "ptx/thread.cuh"
#include "types.cuh"

namespace fa {

// The bits of a thread's scores in a tile, of `Blocks` times `N` registers.
template <int N, int Blocks, int Threads>
struct MaskBits {
    static constexpr int kWords = (Blocks * N + 31) / 32;
    u32 words[kWords];
    bool masks, are_kept;

    // Those of the tile that is the `place`-th to have bits, of a list of at most `most`. A list's tiles have
    // places from its end in forwards, from its begin in backwards.
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

// Several CTAs for each list of at most `most` tiles, each of as many threads as there are consumers: the
// bits of the list's tiles that have some. `place_of(batch, head, outer, inner, b)`: of the list's own tile
// and one of its tiles, where block `b` of a thread lies.
template <class Bits, int Blocks, int TileWords, bool FromEnd, class PlaceOf>
__device__ __forceinline__ void keep_mask_bits(const ProgramParams& programs, const BlockMapParams& map,
                                               int lists, int most, const PlaceOf& place_of) {
    const int ctas = cta_count() / (map.batches * map.heads * lists);
    const int list = cta_index() / ctas, slot = list / lists, outer = list % lists;
    const int batch = slot / map.heads, head = slot % map.heads;
    u32* const entries = map.lists + i64(list) * list_words<TileWords>(map, most);
    const ListedBlocks blocks = ListedBlocks::of(entries);
    const int count = blocks.count();
#pragma unroll 1
    for (int i = cta_index() % ctas; i < min_of(count, map.kept); i += ctas) {
        const BlockEntry entry = blocks.entry(FromEnd ? count - 1 - i : i);
        if (entry.full()) continue;
        Bits bits;
        bits.clear();
#pragma unroll
        for (int b = 0; b < Blocks; ++b)
            bits.find(programs, place_of(batch, head, outer, entry.block(), b), b);
        bits.write(entries, most, i, thread_index());
    }
}

}  // namespace fa
