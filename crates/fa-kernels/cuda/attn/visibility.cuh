// The mask as ranges: the keys that a query sees, and the queries that see a key.
#pragma once
#include "attn/seqlen.cuh"
#include "config.cuh"
#include "params.cuh"

namespace fa {

// The ranges within one sequence, [begin, end). `begin` is not clamped to 0.
template <MaskKind Mask, bool Varied = false>
struct Visibility {
    const ShapeParams& shape;
    Seqlen<Varied> seqlen;

    // Visible keys left and right of the diagonal; -1 for all.
    __device__ __forceinline__ int left() const { return shape.window_left; }
    __device__ __forceinline__ int right() const { return Mask == MaskKind::Causal ? 0 : shape.window_right; }

    __device__ __forceinline__ int keys_begin(int query) const {
        if (Mask != MaskKind::Window || left() < 0) return 0;
        return query + seqlen.k() - seqlen.q() - left();
    }
    __device__ __forceinline__ int keys_end(int query) const {
        if (Mask == MaskKind::Full || (Mask == MaskKind::Window && right() < 0)) return seqlen.k();
        return min(seqlen.k(), query + seqlen.k() - seqlen.q() + right() + 1);
    }
    __device__ __forceinline__ int queries_begin(int key) const {
        if (Mask == MaskKind::Full || (Mask == MaskKind::Window && right() < 0)) return 0;
        return key - (seqlen.k() - seqlen.q()) - right();
    }
    __device__ __forceinline__ int queries_end(int key) const {
        if (Mask != MaskKind::Window || left() < 0) return seqlen.q();
        return min(seqlen.q(), key - (seqlen.k() - seqlen.q()) + left() + 1);
    }
};

}  // namespace fa
