// The scores of a forward's thread as programs see them.
#pragma once
#include "attn/programs.cuh"
#include "attn/rows.cuh"
#include "attn/seqlen.cuh"
#include "params.cuh"

namespace fa {

// Of rows `row` and `row` + 8 of a work tile and of the keys from `first_key` on. `head` is the tile's K/V
// head with PackGqa, else its query head.
template <bool PackGqa, bool Varied>
__device__ __forceinline__ ScorePlace<false, PackGqa> row_place(const ShapeParams& shape,
                                                                const Seqlen<Varied>& seqlen, int batch,
                                                                int head, int row, int first_key) {
    const Rows<PackGqa> rows(shape);
    return {batch,
            seqlen.q(),
            seqlen.k(),
            seqlen.k() - seqlen.q(),
            shape.group_size,
            {rows.head(row, head), rows.head(row + 8, head)},
            {rows.query(row), rows.query(row + 8)},
            first_key};
}

}  // namespace fa
