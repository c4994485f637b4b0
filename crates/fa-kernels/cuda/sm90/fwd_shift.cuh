// Tiles that begin before their rows. TMA loads a row that begins in the middle of a 32-byte sector, as every
// other head's do at head dims 72 and 88, at half its rate or less. A tile with room for it then begins 8
// columns earlier, where the sector does; these columns are out of bounds, hence zeros. (NB-157)
#pragma once
#include "attn/tensor_view.cuh"
#include "config.cuh"
#include "fwd_params.cuh"
#include "sm90/fwd_layout.cuh"
#include "types.cuh"

namespace fa::sm90 {

// Columns of a tile of `Columns` columns before those of the rows of `head`, which have `columns`: 8 or 0.
template <int Columns>
__device__ __forceinline__ int column_shift(const ConstTensor& tensor, int head, int columns) {
    constexpr u64 kSector = 32;
    const u64 strides = u64(tensor.strides.seq) | u64(tensor.strides.batch);
    if (columns + 8 > Columns || strides * sizeof(u16) % kSector != 0) return 0;
    return u32(reinterpret_cast<u64>(view(tensor).row(0, 0, head)) % kSector / sizeof(u16));
}

// That of K's tiles. Q's have the same, so that the columns of their product meet.
template <Sm90FwdConfig C>
__device__ __forceinline__ int key_shift(const FwdParams& params, int kv_head) {
    if constexpr (Traits<C>::kCodes) return 0;
    return column_shift<C.head_dim>(params.k, kv_head, params.shape.head_dim);
}

// That of V's tiles, and thus of O's.
template <Sm90FwdConfig C>
__device__ __forceinline__ int value_shift(const FwdParams& params, int kv_head) {
    if constexpr (!C.shifts_values) return 0;
    return column_shift<C.head_dim_v>(params.v, kv_head, params.shape.head_dim_v);
}

// That of V's tiles if `Values`, else of K's.
template <Sm90FwdConfig C, bool Values>
__device__ __forceinline__ int kv_shift(const FwdParams& params, int kv_head) {
    return Values ? value_shift<C>(params, kv_head) : key_shift<C>(params, kv_head);
}

}  // namespace fa::sm90
