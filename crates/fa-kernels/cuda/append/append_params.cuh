// Written by `cargo xtask codegen` from the Rust types; do not edit.
// The parameters of the append kernel.
#pragma once
#include "params.cuh"

#ifdef __CUDACC_RTC__
#define FA_OFFSETOF(type, field) __INTADDR__(&((type*)0)->field)
#else
#define FA_OFFSETOF(type, field) __builtin_offsetof(type, field)
#endif

namespace fa {

// The arguments of the append kernel. Pointers are null for what a call does not have.
struct AppendParams {
    // New keys, `[batch, rows_new, heads_kv, head_dim]`, or packed `[rows_new, ...]`.
    ConstTensor k_new;
    // New values, `[.., heads_kv, head_dim_v]`.
    ConstTensor v_new;
    // The cache of keys, `[batch, capacity, heads_kv, head_dim]` or `[pages, page, heads_kv, head_dim]`.
    MutTensor k_cache;
    // The cache of values.
    MutTensor v_cache;
    // Queries, `[batch, rows_q, heads_q, head_dim]`, or packed `[rows_q, ...]`.
    ConstTensor q;
    // Where rotated queries go; may be `q`.
    MutTensor q_out;
    // Cosines, `[positions, rotary_dim / 2]`.
    const void* cos;
    // Sines, as cosines.
    const void* sin;
    // `[batch + 1]`: the first new key of each sequence.
    const int* cu_new;
    // `[batch]`: new keys in use.
    const int* used_new;
    // `[batch]`: keys in the cache before.
    const int* used_k;
    // `[batch, table_stride]`: the pages of each sequence.
    const int* page_table;
    // `[batch + 1]`: the first query of each sequence.
    const int* cu_q;
    // `[batch]`: queries in use.
    const int* used_q;
    // `[batch]`: keys in the cache afterwards.
    int* used_out;
    // Counts rows that are skipped for want of a slot.
    unsigned* dropped;
    // Sequences.
    int batch;
    // Query heads.
    int heads_q;
    // Heads of K and V.
    int heads_kv;
    // Elements of a key or query.
    int head_dim;
    // Elements of a value.
    int head_dim_v;
    // New keys of each sequence, or of all where they are packed.
    int rows_new;
    // Queries of each sequence, or of all where they are packed.
    int rows_q;
    // Most keys that a sequence can have in the cache.
    int capacity;
    // Keys of a page.
    int page;
    // Pages of the cache.
    int pages;
    // Entries of a row of the page table.
    int table_stride;
    // Elements of a row that are rotated; 0 for none.
    int rotary_dim;
    // Rows of the tables.
    int positions;
    // Elements of a query that are written: the rotated ones where `q_out` is `q`, else all.
    int q_columns;
    // Whether neighbours are rotated together, not halves.
    int interleaved;
    // Whether the tables are f32, not in the tensors' type.
    int table_f32;
    // Whether the tensors are f16, not bf16.
    int is_f16;
    // Whether all queries of a sequence are at its first new position.
    int q_fixed;
    // Rows per CTA.
    int rows_per_cta;
    // CTAs that process new keys; those after them process queries.
    int ctas_new;
};
static_assert(sizeof(AppendParams) == 352 && alignof(AppendParams) == 8);
static_assert(FA_OFFSETOF(AppendParams, k_new) == 0);
static_assert(FA_OFFSETOF(AppendParams, v_new) == 32);
static_assert(FA_OFFSETOF(AppendParams, k_cache) == 64);
static_assert(FA_OFFSETOF(AppendParams, v_cache) == 96);
static_assert(FA_OFFSETOF(AppendParams, q) == 128);
static_assert(FA_OFFSETOF(AppendParams, q_out) == 160);
static_assert(FA_OFFSETOF(AppendParams, cos) == 192);
static_assert(FA_OFFSETOF(AppendParams, sin) == 200);
static_assert(FA_OFFSETOF(AppendParams, cu_new) == 208);
static_assert(FA_OFFSETOF(AppendParams, used_new) == 216);
static_assert(FA_OFFSETOF(AppendParams, used_k) == 224);
static_assert(FA_OFFSETOF(AppendParams, page_table) == 232);
static_assert(FA_OFFSETOF(AppendParams, cu_q) == 240);
static_assert(FA_OFFSETOF(AppendParams, used_q) == 248);
static_assert(FA_OFFSETOF(AppendParams, used_out) == 256);
static_assert(FA_OFFSETOF(AppendParams, dropped) == 264);
static_assert(FA_OFFSETOF(AppendParams, batch) == 272);
static_assert(FA_OFFSETOF(AppendParams, heads_q) == 276);
static_assert(FA_OFFSETOF(AppendParams, heads_kv) == 280);
static_assert(FA_OFFSETOF(AppendParams, head_dim) == 284);
static_assert(FA_OFFSETOF(AppendParams, head_dim_v) == 288);
static_assert(FA_OFFSETOF(AppendParams, rows_new) == 292);
static_assert(FA_OFFSETOF(AppendParams, rows_q) == 296);
static_assert(FA_OFFSETOF(AppendParams, capacity) == 300);
static_assert(FA_OFFSETOF(AppendParams, page) == 304);
static_assert(FA_OFFSETOF(AppendParams, pages) == 308);
static_assert(FA_OFFSETOF(AppendParams, table_stride) == 312);
static_assert(FA_OFFSETOF(AppendParams, rotary_dim) == 316);
static_assert(FA_OFFSETOF(AppendParams, positions) == 320);
static_assert(FA_OFFSETOF(AppendParams, q_columns) == 324);
static_assert(FA_OFFSETOF(AppendParams, interleaved) == 328);
static_assert(FA_OFFSETOF(AppendParams, table_f32) == 332);
static_assert(FA_OFFSETOF(AppendParams, is_f16) == 336);
static_assert(FA_OFFSETOF(AppendParams, q_fixed) == 340);
static_assert(FA_OFFSETOF(AppendParams, rows_per_cta) == 344);
static_assert(FA_OFFSETOF(AppendParams, ctas_new) == 348);

}  // namespace fa

#undef FA_OFFSETOF
