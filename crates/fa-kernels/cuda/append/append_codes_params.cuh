// Written by `cargo xtask codegen` from the Rust types; do not edit.
// The parameters of appends of codes.
#pragma once
#include "params.cuh"

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

// The codes of a cache, and their descales.
struct AppendCodes {
    // Descales of K.
    AppendDescales k;
    // Descales of V.
    AppendDescales v;
    // Rows of a sequence, or of a page, of the cache.
    int block_rows;
    // Which codes of 8 bits: 0 e4m3, 1 int8, 2 e5m2.
    int kind;
};
static_assert(sizeof(AppendCodes) == 56 && alignof(AppendCodes) == 8);
static_assert(FA_OFFSETOF(AppendCodes, k) == 0);
static_assert(FA_OFFSETOF(AppendCodes, v) == 24);
static_assert(FA_OFFSETOF(AppendCodes, block_rows) == 48);
static_assert(FA_OFFSETOF(AppendCodes, kind) == 52);

}  // namespace fa

#undef FA_OFFSETOF
