// Elements of 16 bits that a score's program reads for each query and key, in shared memory: a warp copies
// those of its next tile while it computes one, and reads them by ldmatrix, as its scores lie in registers.
#pragma once
#include "attn/programs.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

namespace fa {

// The elements of a row of queries, 8 keys at a time.
template <class M = Mods>
struct AheadLine {
    const ProgramArray& array;
    i64 offset;
    // Whether the elements are neighbours in memory, no key of the sequence is beyond them, and chunks of 8,
    // or pairs, begin on as many bytes.
    bool has_chunks, has_pairs;

    __device__ __forceinline__ AheadLine(const M& mods, int query, int first_key, int keys)
        : array(mods.ahead_array()), offset(mods.ahead_offset(mods.row(query))) {
        const u32 address = static_cast<u32>(reinterpret_cast<u64>(at(first_key)));
        const bool is_line = array.strides[M::kAheadAxis] == 1 && array.extents[M::kAheadAxis] >= keys;
        has_chunks = is_line && address % 16 == 0;
        has_pairs = is_line && address % 4 == 0;
    }

    // Of Keys keys from `first_key` on, which go to shared memory from `to` on: every eighth chunk of 8 from
    // `chunk` on.
    template <int Keys>
    __device__ __forceinline__ void copy(u32 to, int first_key, int chunk) const {
        constexpr int kChunks = (Keys + 63) / 64;
        const int key = first_key + 8 * chunk;
        to += 16 * chunk;
        auto counts = [&](int c) { return 64 * c + 64 <= Keys || 64 * c + 8 * chunk < Keys; };
        const int left = array.extents[M::kAheadAxis] - key;
        if (has_chunks) {
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
                if (counts(c)) cp_async_16(to + 128 * c, at(key + 64 * c), bytes_of(left - 64 * c, 8));
            }
        } else if (has_pairs) {
#pragma unroll
            for (int i = 0; i < 4 * kChunks; ++i) {
                const int own = i / 4 * 64 + i % 4 * 2;
                if (counts(i / 4)) cp_async_4(to + 2 * own, at(key + own), bytes_of(left - own, 2));
            }
        } else {
            // One by one.
            const u16* const row = at(0);
            u32 words[4 * kChunks];
#pragma unroll
            for (int i = 0; i < 4 * kChunks; ++i) {
                const int own = key + 64 * (i / 4) + i % 4 * 2;
                const u32 low = row[axis_offset<M::kAheadAxis>(array, own)];
                const u32 high = row[axis_offset<M::kAheadAxis>(array, own + 1)];
                words[i] = low | high << 16;
            }
#pragma unroll
            for (int i = 0; i < 4 * kChunks; ++i) {
                if (counts(i / 4)) store_shared_u32(to + 128 * (i / 4) + i % 4 * 4, words[i]);
            }
        }
    }

  private:
    __device__ __forceinline__ const u16* at(int key) const {
        return static_cast<const u16*>(array.data) + (offset + key);
    }
    __device__ __forceinline__ static int bytes_of(int elements, int most) {
        return 2 * max_of(min_of(elements, most), 0);
    }
};

// Turns products into exponents of 2 as to_exponents() does, by what was copied: `read(words, begin)` reads
// the words of registers from `begin` on.
template <int N, class Params, class Place, class Read>
__device__ __forceinline__ void to_exponents_by_copies(float (&s)[N], const Params& params,
                                                       const ScoreParams& scores, const Place& place,
                                                       const Read& read) {
    constexpr int kPart = N % 16 == 0 ? 16 : 8;
    static_assert(N % kPart == 0);
    cp_async_wait<0>();
    warp_sync();
#pragma unroll
    for (int begin = 0; begin < N; begin += kPart) {
        Ahead<Place, kPart, true> copied;
        read(copied.words_of, begin);
        float part[kPart];
#pragma unroll
        for (int i = 0; i < kPart; ++i) part[i] = s[begin + i];
        to_exponents(part, params, scores, place.after(2 * begin), copied);
#pragma unroll
        for (int i = 0; i < kPart; ++i) s[begin + i] = part[i];
    }
    // All lanes have read before the next copy.
    warp_sync();
}

// Reads the words of N registers by ldmatrix: `own` is the lane's address of those of the first 8 registers,
// those of the next ones lie Step bytes behind.
template <int Step, bool Transposed, int N>
__device__ __forceinline__ void read_copied(u32 (&words)[N], u32 own) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        u32 m[4];
        if constexpr (Transposed) {
            ldmatrix_x4_trans(m, own + i / 4 * Step);
        } else {
            ldmatrix_x4(m, own + i / 4 * Step);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) words[i + j] = m[j];
    }
}

}  // namespace fa
