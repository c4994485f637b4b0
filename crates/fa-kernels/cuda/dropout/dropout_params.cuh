// Written by `cargo xtask codegen` from the Rust types; do not edit.
// The parameters of the dropout kernel.
#pragma once
#include "params.cuh"

#ifdef __CUDACC_RTC__
#define FA_OFFSETOF(type, field) __INTADDR__(&((type*)0)->field)
#else
#define FA_OFFSETOF(type, field) __builtin_offsetof(type, field)
#endif

namespace fa {

// The arguments of the dropout kernel.
struct DropoutParams {
    // `[heads, queries, words]`; written in full.
    unsigned* bits;
    // Seed, offset and threshold, 64 bits each, in place of those below; null for none.
    const void* state;
    // The key of the generator, its lower half first.
    unsigned seed[2];
    // What the counters begin with, likewise.
    unsigned offset[2];
    // The largest byte that keeps.
    unsigned threshold;
    // Query heads of all sequences.
    int heads;
    // Queries of a head.
    int queries;
    // Words of a query, of 32 keys each.
    int words;
};
static_assert(sizeof(DropoutParams) == 48 && alignof(DropoutParams) == 8);
static_assert(FA_OFFSETOF(DropoutParams, bits) == 0);
static_assert(FA_OFFSETOF(DropoutParams, state) == 8);
static_assert(FA_OFFSETOF(DropoutParams, seed) == 16);
static_assert(FA_OFFSETOF(DropoutParams, offset) == 24);
static_assert(FA_OFFSETOF(DropoutParams, threshold) == 32);
static_assert(FA_OFFSETOF(DropoutParams, heads) == 36);
static_assert(FA_OFFSETOF(DropoutParams, queries) == 40);
static_assert(FA_OFFSETOF(DropoutParams, words) == 44);

}  // namespace fa

#undef FA_OFFSETOF
