// Tiles that begin before their rows. TMA loads a row that begins in the middle of a 32-byte sector, as every
// other head's do at head dims 72 and 88, at half its rate or less. A tile with room for it then begins 8
// columns earlier, where the sector does; these columns are out of bounds, hence zeros. (NB-157)
#pragma once
#include "attn/tensor_view.cuh"
#include "fwd_params.cuh"
#include "types.cuh"

namespace fa {

// Columns of a tile of `Columns` columns before those of `head`'s rows, which have `columns`: 8 or 0. Tiles
// of Q and K have K's, so that their columns meet; those of O have V's.
template <int Columns>
__device__ __forceinline__ int column_shift(const ConstTensor& tensor, int head, int columns) {
    constexpr u64 kSector = 32;
    const u64 strides = u64(tensor.strides.seq) | u64(tensor.strides.batch);
    if (columns + 8 > Columns || strides * sizeof(u16) % kSector != 0) return 0;
    return u32(reinterpret_cast<u64>(view(tensor).row(0, 0, head)) % kSector / sizeof(u16));
}

// The shift of O's tile, of `head` or with PackGqa of a group.
template <bool PackGqa, int Columns>
__device__ __forceinline__ int output_shift(const FwdParams& params, int head) {
    const int kv_head = PackGqa ? head : head / params.shape.group_size;
    return column_shift<Columns>(params.v, kv_head, params.shape.head_dim_v);
}

}  // namespace fa
