// Views of 16-bit tensors in global memory: row addresses from a pointer and strides.
#pragma once
#include "params.cuh"
#include "types.cuh"

namespace fa {

template <class Element>
struct TensorView {
    Element* data;
    const RowStrides& strides;  // in the kernel's parameters

    // The row of `head` at `position` of sequence `batch`; the next position is strides.seq elements on.
    __device__ __forceinline__ Element* row(int batch, int position, int head) const {
        return data + batch * strides.batch + position * strides.seq + head * strides.head;
    }
};

__device__ __forceinline__ TensorView<const u16> view(const ConstTensor& tensor) {
    return {static_cast<const u16*>(tensor.data), tensor.strides};
}
__device__ __forceinline__ TensorView<u16> view(const MutTensor& tensor) {
    return {static_cast<u16*>(tensor.data), tensor.strides};
}

}  // namespace fa
