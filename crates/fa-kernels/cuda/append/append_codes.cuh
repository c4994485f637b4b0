// The append kernels of caches of codes, of 8 bits (e4m3, e5m2, int8) or of 4 (int4): as append.cuh, and each
// new row of K and V is multiplied by the reciprocal of its descale, rounded and stored as codes. Descales of
// each row are computed from the row, rotated, and stored too.
#pragma once
#include "append/append.cuh"
#include "append/append_codes_params.cuh"
#include "attn/store_rows.cuh"
#include "config.cuh"
#include "ptx/math.cuh"
#include "ptx/thread.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

namespace fa {

// What the elements of a row become: of 8 bits as `AppendCodes::kind` says.
enum class CodeKind { E4m3, Int8, E5m2, Int4 };

// The largest number of a code.
__device__ __forceinline__ constexpr float largest_of(CodeKind kind) {
    return kind == CodeKind::E4m3   ? 448.f
           : kind == CodeKind::E5m2 ? 57344.f
           : kind == CodeKind::Int8 ? 127.f
                                    : 7.f;
}

// The nearest integer, ties to even, in the low mantissa bits.
__device__ __forceinline__ u32 nearest(float x) { return bits_of_float(x + 12582912.f); }

// The nearest code, ties to even, saturating; NaN gives NaN, of integers 0.
__device__ __forceinline__ u32 encode(float x, CodeKind kind) {
    const bool nan = x != x;
    const float most = largest_of(kind);
    if (kind == CodeKind::Int8 || kind == CodeKind::Int4) {
        const u32 mask = kind == CodeKind::Int8 ? 0xff : 0xf;
        return nan ? 0 : nearest(fminf(fmaxf(x, -most), most)) & mask;
    }
    const bool wide = kind == CodeKind::E5m2;
    const float size = fminf(fabsf(x), most);
    // Below the smallest normal number, 2^-6 or 2^-14: steps of 2^-9 or 2^-16.
    u32 code = nearest(multiply_rounded(size, wide ? 65536.f : 512.f)) & 0xff;
    if (size >= (wide ? 6.10351562e-5f : 0.015625f)) {
        const int shift = wide ? 21 : 20;
        const u32 bits = bits_of_float(size);
        code = (bits + (1u << shift - 1) - 1 + (bits >> shift & 1) >> shift) - (wide ? 112 << 2 : 120 << 3);
    }
    return nan ? 0x7f : code | bits_of_float(x) >> 24 & 0x80;
}

// What a row is multiplied by.
__device__ __forceinline__ float reciprocal(float descale) {
    const float factor = 1.f / descale;
    if (descale == 0.f) return 0.f;
    return factor > kLargest ? kLargest : factor < -kLargest ? -kLargest : factor;
}

// The largest finite magnitude of a warp's row, of which a lane has `own`.
__device__ __forceinline__ float row_amax(float own) {
#pragma unroll
    for (int mask = 1; mask < 32; mask <<= 1) own = fmaxf(own, shuffle_xor(own, mask));
    return own;
}

// In the place of a row: takes its largest finite magnitude, or stores it as codes.
template <Dtype T>
struct Amax {
    float& amax;
};
template <Dtype T, bool Int4>
struct Quantiser {
    u8* to;
    float factor;
    CodeKind kind;
};

template <Dtype T>
__device__ __forceinline__ void store_item(const Amax<T>& of, int, const Vec16& vec) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 pair = vec.words[i / 2];
        const float size = fabsf(i % 2 == 0 ? unpack_low<T>(pair) : unpack_high<T>(pair));
        of.amax = size <= kLargest ? fmaxf(of.amax, size) : of.amax;
    }
}

template <Dtype T, bool Int4>
__device__ __forceinline__ void store_item(const Quantiser<T, Int4>& of, int column, const Vec16& vec) {
    using Codes = Either<Int4, u32, u64>;  // eight of them
    constexpr int kBits = sizeof(Codes);
    Codes codes = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 pair = vec.words[i / 2];
        const float value = i % 2 == 0 ? unpack_low<T>(pair) : unpack_high<T>(pair);
        const u32 code = encode(multiply_rounded(value, of.factor), Int4 ? CodeKind::Int4 : of.kind);
        codes |= Codes(code) << kBits * i;
    }
    *reinterpret_cast<Codes*>(of.to + column * kBits / 8) = codes;
}

// The parameters of the kernel of 8-bit codes, and of that of int4.
struct AppendCodesParams : AppendParams {
    AppendCodes codes;
};
struct AppendInt4Params : AppendCodesParams {};
static_assert(sizeof(AppendCodesParams) == sizeof(AppendParams) + sizeof(AppendCodes));

// Stores a row of K or V as codes. A warp calls it.
template <Dtype T, bool Int4>
__device__ __forceinline__ void quantise_row(const AppendCodesParams& params, const AppendRow& row, int head,
                                             const ConstTensor& source, const MutTensor& target,
                                             const AppendDescales& descales, int columns, int turned) {
    const int lane = lane_index(), items = items_of(params, columns, turned);
    const u16* const from = view(source).row(row.sequence, row.from, head);
    u8* const to = static_cast<u8*>(target.data) + row.block * target.strides.batch +
                   row.to * target.strides.seq + head * target.strides.head;
    const CodeKind kind = Int4 ? CodeKind::Int4 : CodeKind(params.codes.kind);
    float descale = 1.f;
    if (descales.of_rows != nullptr) {
        float amax = 0.f;
        for (int item = lane; item < items; item += 32)
            move_item<T>(params, from, Amax<T>{amax}, item, row.position, turned);
        descale = fmaxf(row_amax(amax) / largest_of(kind), 1.17549435e-38f);
        if (lane == 0)
            descales.of_rows[(i64(row.block) * params.codes.block_rows + row.to) * params.heads_kv + head] =
                descale;
    } else if (descales.of_head != nullptr) {
        const AppendSide side{params.cu_new, params.used_new, params.rows_new};
        const int sequence = side.cu == nullptr ? row.sequence : side.sequence(row.from, params.batch);
        descale = descales.of_head[i64(sequence) * descales.sequence_stride + head];
    }
    const Quantiser<T, Int4> quantiser{to, reciprocal(descale), kind};
    for (int item = lane; item < items; item += 32)
        move_item<T>(params, from, quantiser, item, row.position, turned);
}

// The rows of K and V as codes, a warp a row and head; queries as in the other kernel.
template <Dtype T, bool Int4>
__device__ __forceinline__ void move_code_rows(const AppendCodesParams& params, const AppendRows& smem,
                                               int rows, bool queries) {
    if (queries) return move_rows<T>(static_cast<const AppendParams&>(params), smem, rows, true);
    const int warp = thread_index() / 32, warps = cta_threads() / 32, heads = params.heads_kv;
    for (int i = warp; i < rows * heads * 2; i += warps) {
        const AppendRow& row = smem.rows[i / (2 * heads)];
        if (row.position < 0) continue;
        const int head = i / 2 % heads;
        if (i % 2 == 0) {
            quantise_row<T, Int4>(params, row, head, params.k_new, params.k_cache, params.codes.k,
                                  params.head_dim, params.rotary_dim);
        } else {
            quantise_row<T, Int4>(params, row, head, params.v_new, params.v_cache, params.codes.v,
                                  params.head_dim_v, 0);
        }
    }
}

template <Dtype T>
__device__ __forceinline__ void move_rows(const AppendCodesParams& params, const AppendRows& smem, int rows,
                                          bool queries) {
    move_code_rows<T, false>(params, smem, rows, queries);
}
template <Dtype T>
__device__ __forceinline__ void move_rows(const AppendInt4Params& params, const AppendRows& smem, int rows,
                                          bool queries) {
    move_code_rows<T, true>(params, smem, rows, queries);
}

}  // namespace fa
