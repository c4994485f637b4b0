// Written by `cargo xtask codegen` from the Rust types; do not edit.
// The parameters of the merge kernel.
#pragma once
#include "params.cuh"

#ifdef __CUDACC_RTC__
#define FA_OFFSETOF(type, field) __INTADDR__(&((type*)0)->field)
#else
#define FA_OFFSETOF(type, field) __builtin_offsetof(type, field)
#endif

namespace fa {

// A partial result.
struct MergePart {
    // O over the part's keys, `[batch, seqlen, heads, dim]`.
    ConstTensor out;
    // Its LSE, `[batch, heads, seqlen]` packed.
    const float* lse;
};
static_assert(sizeof(MergePart) == 40 && alignof(MergePart) == 8);
static_assert(FA_OFFSETOF(MergePart, out) == 0);
static_assert(FA_OFFSETOF(MergePart, lse) == 32);

// The parts of a launch; `count` are used.
struct MergeParts {
    // In the order of the call.
    MergePart items[16];
};
static_assert(sizeof(MergeParts) == 640 && alignof(MergeParts) == 8);
static_assert(FA_OFFSETOF(MergeParts, items) == 0);

// The arguments of the merge kernel. Types are 0 for f32, 1 for f16, 2 for bf16.
struct MergeParams {
    // What is merged.
    MergeParts parts;
    // The merged O, `[batch, seqlen, heads, dim]`; written in full.
    MutTensor out;
    // The merged LSE, `[batch, heads, seqlen]` packed; null for none.
    float* lse;
    // `[heads]`, in natural units; null for none.
    const float* sinks;
    // Parts.
    int count;
    // Independent sequences.
    int batch;
    // Positions of a sequence.
    int seqlen;
    // Heads.
    int heads;
    // Elements of a row, a multiple of 8.
    int dim;
    // The type of the parts.
    int part_type;
    // The type of the merged O.
    int out_type;
};
static_assert(sizeof(MergeParams) == 720 && alignof(MergeParams) == 8);
static_assert(FA_OFFSETOF(MergeParams, parts) == 0);
static_assert(FA_OFFSETOF(MergeParams, out) == 640);
static_assert(FA_OFFSETOF(MergeParams, lse) == 672);
static_assert(FA_OFFSETOF(MergeParams, sinks) == 680);
static_assert(FA_OFFSETOF(MergeParams, count) == 688);
static_assert(FA_OFFSETOF(MergeParams, batch) == 692);
static_assert(FA_OFFSETOF(MergeParams, seqlen) == 696);
static_assert(FA_OFFSETOF(MergeParams, heads) == 700);
static_assert(FA_OFFSETOF(MergeParams, dim) == 704);
static_assert(FA_OFFSETOF(MergeParams, part_type) == 708);
static_assert(FA_OFFSETOF(MergeParams, out_type) == 712);

}  // namespace fa

#undef FA_OFFSETOF
