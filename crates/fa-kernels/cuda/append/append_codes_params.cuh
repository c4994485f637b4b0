// Written by `cargo xtask codegen` from the Rust types; do not edit.
// The parameters of appends of codes.
#pragma once
#include "append/append_params.cuh"

#ifdef __CUDACC_RTC__
#define FA_OFFSETOF(type, field) __INTADDR__(&((type*)0)->field)
#else
#define FA_OFFSETOF(type, field) __builtin_offsetof(type, field)
#endif

namespace fa {

// The descales of K, or of V. Without both pointers they are 1.
struct AppendDescales {
    // `[heads_kv]` or `[batch, heads_kv]`, read; null for none, and where each row has its own.
    const float* of_head;
    // `[rows of the cache, heads_kv]`, written for new rows; null unless each row has its own.
    float* of_rows;
    // Distance between the descales of two sequences; 0 for descales per head.
    long long sequence_stride;
};
static_assert(sizeof(AppendDescales) == 24 && alignof(AppendDescales) == 8);
static_assert(FA_OFFSETOF(AppendDescales, of_head) == 0);
static_assert(FA_OFFSETOF(AppendDescales, of_rows) == 8);
static_assert(FA_OFFSETOF(AppendDescales, sequence_stride) == 16);

// The arguments of the append kernel of caches of 8-bit codes.
struct AppendCodesParams {
    // Those of the other kernel; the caches are of codes.
    AppendParams append;
    // Of K.
    AppendDescales k;
    // Of V.
    AppendDescales v;
    // Rows of a sequence, or of a page, of the cache.
    int block_rows;
    // Whether codes are int8, not e4m3.
    int is_int8;
};
static_assert(sizeof(AppendCodesParams) == 408 && alignof(AppendCodesParams) == 8);
static_assert(FA_OFFSETOF(AppendCodesParams, append) == 0);
static_assert(FA_OFFSETOF(AppendCodesParams, k) == 352);
static_assert(FA_OFFSETOF(AppendCodesParams, v) == 376);
static_assert(FA_OFFSETOF(AppendCodesParams, block_rows) == 400);
static_assert(FA_OFFSETOF(AppendCodesParams, is_int8) == 404);

}  // namespace fa

#undef FA_OFFSETOF
