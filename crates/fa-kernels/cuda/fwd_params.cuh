// Written by `cargo xtask codegen` from the Rust types; do not edit.
// The parameters of a forward.
#pragma once
#include "params.cuh"

#ifdef __CUDACC_RTC__
#define FA_OFFSETOF(type, field) __INTADDR__(&((type*)0)->field)
#else
#define FA_OFFSETOF(type, field) __builtin_offsetof(type, field)
#endif

namespace fa {

// The arguments of every forward kernel.
struct FwdParams {
    // Q, `[batch, seqlen_q, heads_q, head_dim]`.
    ConstTensor q;
    // K, `[batch, seqlen_k, heads_kv, head_dim]`.
    ConstTensor k;
    // V, `[batch, seqlen_k, heads_kv, head_dim_v]`.
    ConstTensor v;
    // O, `[batch, seqlen_q, heads_q, head_dim_v]`; written in full.
    MutTensor out;
    // LSE, `[batch, heads_q, seqlen_q]` packed, natural logarithm; null for none.
    float* lse;
    // The next tile to be drawn, 0 at launch; null unless the scheduler is dynamic.
    unsigned* tile_counter;
    // Lengths and counts.
    ShapeParams shape;
    // From products to scores.
    ScoreParams score;
    // Tiles of `tile_queries` queries of a head (of a group's heads with `pack_gqa`), rounded up to
    // `cluster_m`.
    int m_blocks;
    // Queries of a tile: `tile_m`, or with `pack_gqa` as many as fit with all heads of a group.
    int tile_queries;
    // Tiles in all: `m_blocks * heads * batch`, with `heads_kv` for heads under `pack_gqa`.
    int num_tiles;
    // Heads, counted over all sequences, whose K and V fit in L2 together: the size of the sections of
    // `LongestFirst`.
    int heads_per_section;
    // Number of whole sections; the last section has the heads after them.
    int sections;
    // Sequences of different lengths; kernels with `varied` only.
    VarlenParams varlen;
    // Kernels with `alibi` or `sinks` only.
    ModParams mods;
    // Kernels with `split` only.
    SplitParams split;
    // Kernels with `varied` only.
    PlanParams plan;
};
static_assert(sizeof(FwdParams) == 472 && alignof(FwdParams) == 8);
static_assert(FA_OFFSETOF(FwdParams, q) == 0);
static_assert(FA_OFFSETOF(FwdParams, k) == 32);
static_assert(FA_OFFSETOF(FwdParams, v) == 64);
static_assert(FA_OFFSETOF(FwdParams, out) == 96);
static_assert(FA_OFFSETOF(FwdParams, lse) == 128);
static_assert(FA_OFFSETOF(FwdParams, tile_counter) == 136);
static_assert(FA_OFFSETOF(FwdParams, shape) == 144);
static_assert(FA_OFFSETOF(FwdParams, score) == 184);
static_assert(FA_OFFSETOF(FwdParams, m_blocks) == 228);
static_assert(FA_OFFSETOF(FwdParams, tile_queries) == 232);
static_assert(FA_OFFSETOF(FwdParams, num_tiles) == 236);
static_assert(FA_OFFSETOF(FwdParams, heads_per_section) == 240);
static_assert(FA_OFFSETOF(FwdParams, sections) == 244);
static_assert(FA_OFFSETOF(FwdParams, varlen) == 248);
static_assert(FA_OFFSETOF(FwdParams, mods) == 376);
static_assert(FA_OFFSETOF(FwdParams, split) == 408);
static_assert(FA_OFFSETOF(FwdParams, plan) == 432);

}  // namespace fa

#undef FA_OFFSETOF
