// Written by `cargo xtask codegen` from the Rust types; do not edit.
// The parameters of an 8-bit cache.
#pragma once
#include "params.cuh"

#ifdef __CUDACC_RTC__
#define FA_OFFSETOF(type, field) __INTADDR__(&((type*)0)->field)
#else
#define FA_OFFSETOF(type, field) __builtin_offsetof(type, field)
#endif

namespace fa {

// What the codes of a tensor are multiplied by. Without both pointers that is 1.
struct CodeDescales {
    // `[heads_kv]` or `[batch, heads_kv]`; null for none, and where each row has its own.
    const float* of_head;
    // `[rows, heads_kv]`, in the layout of the cache; null unless each row has its own.
    const float* of_rows;
    // Distance between the descales of two sequences; 0 for descales per head.
    long long sequence_stride;
};
static_assert(sizeof(CodeDescales) == 24 && alignof(CodeDescales) == 8);
static_assert(FA_OFFSETOF(CodeDescales, of_head) == 0);
static_assert(FA_OFFSETOF(CodeDescales, of_rows) == 8);
static_assert(FA_OFFSETOF(CodeDescales, sequence_stride) == 16);

// The descales of 8-bit tensors.
struct CacheParams {
    // Of K.
    CodeDescales k;
    // Of V.
    CodeDescales v;
    // Of an e4m3 Q, by its K/V head.
    CodeDescales q;
};
static_assert(sizeof(CacheParams) == 72 && alignof(CacheParams) == 8);
static_assert(FA_OFFSETOF(CacheParams, k) == 0);
static_assert(FA_OFFSETOF(CacheParams, v) == 24);
static_assert(FA_OFFSETOF(CacheParams, q) == 48);

}  // namespace fa

#undef FA_OFFSETOF
