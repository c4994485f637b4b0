// The lengths of one sequence. Every header asks a Seqlen for them, never the parameters.
#pragma once
#include "params.cuh"

namespace fa {

// Made once per work tile, for its sequence `batch`: all sequences of a batch have equal lengths. It reads
// the parameters, which cost no registers, wherever it is asked.
struct Seqlen {
    const ShapeParams& shape;

    __device__ __forceinline__ Seqlen(const ShapeParams& shape, int /* batch */) : shape(shape) {}

    __device__ __forceinline__ int q() const { return shape.seqlen_q; }
    __device__ __forceinline__ int k() const { return shape.seqlen_k; }
};

}  // namespace fa
