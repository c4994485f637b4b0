// Elements of 16 bits that a program reads for each query and key, in shared memory a tile before they are
// needed. Each warp copies what its own scores need, and waits for nobody else.
#pragma once
#include "attn/programs.cuh"
#include "config.cuh"
#include "program_params.cuh"
#include "ptx/compiler.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

namespace fa {

// Whether the score's program reads such an array.
template <class M = Mods>
constexpr bool copies_ahead() {
    if constexpr (ahead_form<M>() == AheadForm::Keys) {
        return M::kAheadBytes == 2;
    }
    return false;
}

// Whether its rows are aligned, as the program declares: they begin on 16 bytes and have an element for each
// key, one behind the other.
template <class M = Mods>
constexpr bool has_aligned_rows() {
    if constexpr (requires { typename M::AlignedRows; }) {
        return true;
    }
    return false;
}

// What a warp has copied: nothing, where the array does not allow it; one row, which all of its queries
// share; or a row for each query.
enum class AheadRows : u8 { None, One, Each };

// Copies by a warp, element by element, from `key` on of a row that all queries share.
template <int Keys, class M>
__device__ __forceinline__ void copy_one_row(u32 to, const ProgramArray& array, i64 offset, int key) {
    const u16* const row = static_cast<const u16*>(array.data) + offset;
#pragma unroll 1
    for (int at = 2 * lane_index(); at < Keys; at += 64) {
        const u32 low = row[axis_offset<M::kAheadAxis>(array, key + at)];
        const u32 high = row[axis_offset<M::kAheadAxis>(array, key + at + 1)];
        store_shared_u32(to + 2 * at, low | high << 16);
    }
}

// The elements of some registers, as Ahead has them.
template <int N, class M = Mods>
struct AheadPart {
    enum : bool { kReads = true };
    u32 words_of[(N + 1) / 2];

    __device__ __forceinline__ float at(int i) const {
        return M::ahead_value(words_of[i / 2] >> (i % 2 * 16));
    }
};

// A warp's part of a tile, N registers of S or S^T in each thread. Rows are of queries. Those of S have 16
// bytes behind them, those of S^T, of 16 keys, their two halves exchanged in every other four: ldmatrix,
// which reads both as scores lie in registers, then finds no two of eight rows in the same banks.
template <class Place, int N, class M = Mods>
struct AheadCopies {
    // Enumerators, which are no symbols of a cubin.
    enum : int {
        kRows = Place::kTransposed ? 2 * N : 16,
        kKeys = Place::kTransposed ? 16 : 2 * N,
        kChunks = kKeys / 8,  // of 16 bytes
        kPitch = Place::kTransposed ? 32 : 2 * kKeys + 16,
        kBytes = kRows * kPitch
    };

    AheadRows rows = AheadRows::None;

    // Starts to copy to shared memory at `to`. `offset_of(r)`: where row r of the array is; of its columns
    // those from `first_key` on, a multiple of 8, are copied, as far as the sequence's `keys` may reach.
    template <class OffsetOf>
    __device__ __forceinline__ void start(u32 to, const M& mods, int first_key, int keys,
                                          const OffsetOf& offset_of) {
        constexpr int kAxis = M::kAheadAxis;
        // Where rows are is found anew for each tile: there are no registers to keep it in.
        u32 own = lane_index();
        opaque(own);
        const int lane = own;
        const ProgramArray& array = mods.ahead_array();
        const u16* const data = static_cast<const u16*>(array.data);
        const i64 first = offset_of(0);
        bool differ = false;
        u32 places = 0;
#pragma unroll
        for (int r = 0; r < kRows; r += 32) {
            const i64 offset = offset_of(min_of(r + lane, kRows - 1));
            differ = differ || offset != first;
            places |= static_cast<u32>(reinterpret_cast<u64>(data + offset));
        }
        // Where the array ends before the sequence, its last element is read for what is beyond.
        const bool is_plain = array.strides[kAxis] == 1 && array.extents[kAxis] >= keys;
        const bool each = warp_any(differ);
        rows = !each                                    ? AheadRows::One
               : is_plain && !warp_any(places % 4 != 0) ? AheadRows::Each
                                                        : AheadRows::None;
        if (rows == AheadRows::None) return;
        const int left = array.extents[kAxis] - first_key;
        // All lanes have read what is overwritten.
        warp_sync();
        if (!each) {
            copy_one_row<kKeys, M>(to, array, first, first_key);
        } else if (!warp_any(places % 16 != 0)) {
#pragma unroll
            for (int i = 0; i < kRows * kChunks; i += 32) {
                const int at = i + lane;
                if (at >= kRows * kChunks) break;
                const int row = at / kChunks, chunk = at % kChunks;
                const int bytes = max_of(min_of(2 * (left - 8 * chunk), 16), 0);
                const int key = bytes > 0 ? first_key + 8 * chunk : 0;
                cp_async_16(to + place(row, chunk), data + (offset_of(row) + key), bytes);
            }
        } else {
#pragma unroll 1
            for (int at = lane; at < 4 * kRows * kChunks; at += 32) {
                const int row = at / (4 * kChunks), pair = at % (4 * kChunks);
                const int bytes = max_of(min_of(2 * (left - 2 * pair), 4), 0);
                const int key = bytes > 0 ? first_key + 2 * pair : 0;
                cp_async_4(to + place(row, pair / 4) + pair % 4 * 4, data + (offset_of(row) + key), bytes);
            }
        }
        cp_async_commit();
    }

    // Waits for what all lanes have copied.
    __device__ __forceinline__ void wait() const {
        cp_async_wait<0>();
        warp_sync();
    }

    // The elements of registers [begin, begin + Count) from shared memory at `from`: of 4 registers, or of 8
    // from a multiple of 8 on.
    template <int Count>
    __device__ __forceinline__ AheadPart<Count, M> part(u32 from, int begin) const {
        static_assert(Count == 4 || Count == 8);
        const int lane = lane_index();
        const bool each = rows == AheadRows::Each;
        u32 words[4];
        if constexpr (Place::kTransposed) {
            const int row = lane % 8 + (Count == 8 ? lane / 16 * 8 : 0) + 2 * begin;
            ldmatrix_x4_trans(words, from + place(each ? row : 0, lane / 8 % 2));
        } else {
            const int chunk = (Count == 8 ? lane / 16 : 0) + begin / 4;
            ldmatrix_x4(words, from + place(each ? lane % 16 : 0, chunk));
        }
        AheadPart<Count, M> read;
#pragma unroll
        for (int i = 0; i < Count / 2; ++i) read.words_of[i] = words[i];
        return read;
    }

    // Where a chunk of a row lies.
    __device__ __forceinline__ static u32 place(int row, int chunk) {
        return row * kPitch + 16 * (Place::kTransposed ? chunk ^ (row / 4 & 1) : chunk);
    }
};

// The same of a tile of S, copied from the thread's own two rows, which are found once for all tiles of keys:
// four threads copy 64 bytes of a row at a time, or with Lines, where rows are aligned, the warp row by row.
// Rows that may begin anywhere are copied by the 16-byte chunks around them, one more than they have, to the
// place that pads them, and read with their shift.
template <class Place, int N, bool Lines, class M = Mods>
struct AheadOfRows : AheadCopies<Place, N, M> {
    using Base = AheadCopies<Place, N, M>;
    using Base::rows;

    // Enumerators, which are no symbols of a cubin.
    enum : bool { kAligned = has_aligned_rows<M>(), kByLines = Lines && kAligned && Base::kChunks % 4 == 0 };
    enum : int { kCopied = Base::kChunks + (kAligned ? 0 : 1) };  // chunks of a row

    const u16* own[2];
    // Of rows that are not aligned: whether they have an element for each key, one behind the other, and
    // whether all of the warp's begin on 4 bytes.
    bool plain, even;

    // `place`: of the thread's rows, in a sequence of `keys`.
    __device__ __forceinline__ void prepare(const ProgramParams& params, const Place& place, int keys) {
        const M first = place.mods(params, 0), second = place.mods(params, 1);
        const ProgramArray& array = first.ahead_array();
        const u16* const data = static_cast<const u16*>(array.data);
        own[0] = data + first.ahead_offset(first.row(place.query[0]));
        own[1] = data + second.ahead_offset(second.row(place.query[1]));
        const u64 places[2] = {reinterpret_cast<u64>(own[0]), reinterpret_cast<u64>(own[1])};
        const u64 of_first = shuffle_from(static_cast<u32>(places[0]), 0) |
                             u64(shuffle_from(static_cast<u32>(places[0] >> 32), 0)) << 32;
        const bool differ = places[0] != of_first || places[1] != of_first;
        if constexpr (!kAligned) {
            plain = array.strides[M::kAheadAxis] == 1 && array.extents[M::kAheadAxis] >= keys;
            const u32 shifts = static_cast<u32>(places[0]) | static_cast<u32>(places[1]);
            even = !warp_any(shifts % 4 != 0);
        }
        rows = (kAligned || plain) && !warp_any(differ) ? AheadRows::One : AheadRows::Each;
    }

    __device__ __forceinline__ void start(u32 to, const ProgramParams& params, int first_key) const {
        const ProgramArray& array = M(params, 0, 0, 0, 0, 0, 0).ahead_array();
        const int lane = lane_index();
        // All lanes have read what is overwritten.
        warp_sync();
        if (!kAligned && !plain) {
            copy_elements(to, array, first_key);
            return;
        }
        const int left = array.extents[M::kAheadAxis] - first_key;
        const bool inside = left >= Base::kKeys + (kAligned ? 0 : 8);
        if (rows == AheadRows::One) {
            for (int chunk = lane; chunk < kCopied; chunk += 32)
                copy_chunk(to + Base::place(0, chunk), 0, first_key, chunk, left);
        } else if (kByLines && inside) {
#pragma unroll
            for (int i = 0; i < Base::kChunks / 2; ++i) {
                const int at = 32 * i + lane, row = at / Base::kChunks, chunk = at % Base::kChunks;
                const u64 place = reinterpret_cast<u64>(own[i >= Base::kChunks / 4]);
                const u32 low = shuffle_from(static_cast<u32>(place), row % 8 * 4);
                const u32 high = shuffle_from(static_cast<u32>(place >> 32), row % 8 * 4);
                const u16* const from = reinterpret_cast<const u16*>(low | u64(high) << 32);
                cp_async_16(to + Base::place(row, chunk), from + (first_key + 8 * chunk), 16);
            }
        } else {
            constexpr int kPairs = Base::kChunks / 4 * 4;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = lane / 4 + 8 * r;
                if (inside) {
                    const u16* const from = begin_of(r) + (first_key + lane % 4 * 8);
                    const u32 at = to + Base::place(row, lane % 4);
#pragma unroll
                    for (int chunk = 0; chunk < Base::kChunks; chunk += 4) {
                        if (chunk < kPairs || lane % 4 < Base::kChunks - kPairs)
                            cp_async_16(at + 16 * chunk, from + 8 * chunk, 16);
                    }
                    if (!kAligned && lane % 4 == 0)
                        cp_async_16(at + 16 * Base::kChunks, from + 8 * Base::kChunks, 16);
                } else {
#pragma unroll 1
                    for (int chunk = lane % 4; chunk < kCopied; chunk += 4)
                        copy_chunk(to + Base::place(row, chunk), r, first_key, chunk, left);
                }
            }
        }
        cp_async_commit();
    }

    // The elements of registers [begin, begin + Count) from shared memory at `from`.
    template <int Count>
    __device__ __forceinline__ AheadPart<Count, M> part(u32 from, int begin) const {
        static_assert(Count % 8 == 0);
        AheadPart<Count, M> read;
        if constexpr (kAligned) {
#pragma unroll
            for (int i = 0; i < Count; i += 8) {
                const auto eight = Base::template part<8>(from, begin + i);
#pragma unroll
                for (int j = 0; j < 4; ++j) read.words_of[i / 2 + j] = eight.words_of[j];
            }
        } else {
            const int lane = lane_index();
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = rows == AheadRows::Each ? lane / 4 + 8 * r : 0;
                const u32 shift = reinterpret_cast<u64>(own[r]) % 16;
                const u32 at = from + Base::place(row, begin / 4) + lane % 4 * 4 + shift;
                if (even) {
#pragma unroll
                    for (int i = 0; i < Count / 4; ++i)
                        read.words_of[2 * i + r] = load_shared_u32(at + 16 * i);
                } else {
                    const u32 word = at & ~3u, bits = 8 * (at & 2);
#pragma unroll
                    for (int i = 0; i < Count / 4; ++i) {
                        const u64 high = load_shared_u32(word + 16 * i + 4);
                        read.words_of[2 * i + r] = (high << 32 | load_shared_u32(word + 16 * i)) >> bits;
                    }
                }
            }
        }
        return read;
    }

    // The elements of all registers, in the order of Ahead's.
    __device__ __forceinline__ void read(u32 (&words)[N / 2], u32 from) const {
        Base::wait();
        const auto all = part<N>(from, 0);
#pragma unroll
        for (int i = 0; i < N / 2; ++i) words[i] = all.words_of[i];
    }

  private:
    // Where the chunk begins that row r of the thread begins in.
    __device__ __forceinline__ const u16* begin_of(int r) const {
        return kAligned ? own[r] : reinterpret_cast<const u16*>(reinterpret_cast<u64>(own[r]) & ~u64(15));
    }

    // Copies what the row has of a chunk, with `left` elements from `first_key` on.
    __device__ __forceinline__ void copy_chunk(u32 to, int r, int first_key, int chunk, int left) const {
        const int before = kAligned ? 0 : static_cast<int>(reinterpret_cast<u64>(own[r]) % 16 / 2);
        const int bytes = max_of(min_of(2 * (left + before - 8 * chunk), 16), 0);
        const u16* const from = begin_of(r) + first_key;
        cp_async_16(to, bytes > 0 ? from + 8 * chunk : from, bytes);
    }

    // Element by element, to where the row's shift is.
    __device__ __forceinline__ void copy_elements(u32 to, const ProgramArray& array, int first_key) const {
        const int lane = lane_index();
#pragma unroll 1
        for (int chunk = 0; chunk < Base::kChunks; ++chunk) {
            const int key = first_key + 8 * chunk + lane % 4 * 2;
            const i64 low = axis_offset<M::kAheadAxis>(array, key);
            const i64 high = axis_offset<M::kAheadAxis>(array, key + 1);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const u32 shift = reinterpret_cast<u64>(own[r]) % 16;
                const u32 at = to + Base::place(lane / 4 + 8 * r, chunk) + lane % 4 * 4 + shift;
                store_shared_u16(at, own[r][low]);
                store_shared_u16(at + 2, own[r][high]);
            }
        }
    }
};

// The copies of `Count` parts, where a program has some.
template <class Copies, int Count>
struct SomeAheadTiles {
    alignas(128) u8 parts[Count][Copies::kBytes];
};
struct NoAheadTiles {};
template <class Copies, int Count>
using AheadTiles = Either<copies_ahead(), SomeAheadTiles<Copies, Count>, NoAheadTiles>;

// What a backward's warp has copied for each of `Count` blocks, and the head of its next step.
template <class Copies, int Count>
struct SomeAheadState {
    Copies copies[Count];
    int head;
};
struct NoAheadState {};
template <class Copies, int Count>
using AheadState = Either<copies_ahead(), SomeAheadState<Copies, Count>, NoAheadState>;

// to_exponents() of what has been copied to shared memory at `from`.
template <int N, class Params, class Place>
__device__ __forceinline__ void to_exponents(float (&s)[N], const Params& params, const ScoreParams& scores,
                                             const Place& place, const AheadCopies<Place, N>& copies,
                                             u32 from) {
    if (copies.rows == AheadRows::None) return to_exponents(s, params, scores, place);
    copies.wait();
    auto change = [&](auto& part, int begin) {
        constexpr int kCount = sizeof(part) / sizeof(float);
#pragma unroll
        for (int i = 0; i < kCount; ++i) part[i] = s[begin + i];
        to_exponents(part, params, scores, place.after(2 * begin), copies.template part<kCount>(from, begin));
#pragma unroll
        for (int i = 0; i < kCount; ++i) s[begin + i] = part[i];
    };
#pragma unroll
    for (int begin = 0; begin + 8 <= N; begin += 8) {
        float part[8];
        change(part, begin);
    }
    if constexpr (N % 8 != 0) {
        float part[4];
        change(part, N - 4);
    }
}

// The same of a tile of S.
template <int N, class Params, class Place, bool Lines>
__device__ __forceinline__ void to_exponents(float (&s)[N], const Params& params, const ScoreParams& scores,
                                             const Place& place, const AheadOfRows<Place, N, Lines>& copies,
                                             u32 from) {
    constexpr int kPart = N % 16 == 0 ? 16 : 8;
    copies.wait();
#pragma unroll
    for (int begin = 0; begin < N; begin += kPart) {
        float part[kPart];
#pragma unroll
        for (int i = 0; i < kPart; ++i) part[i] = s[begin + i];
        to_exponents(part, params, scores, place.after(2 * begin), copies.template part<kPart>(from, begin));
#pragma unroll
        for (int i = 0; i < kPart; ++i) s[begin + i] = part[i];
    }
}

}  // namespace fa
