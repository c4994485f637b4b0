// Written by `cargo xtask codegen` from the Rust types; do not edit.
// The parameters of a backward.
#pragma once
#include "params.cuh"

#ifdef __CUDACC_RTC__
#define FA_OFFSETOF(type, field) __INTADDR__(&((type*)0)->field)
#else
#define FA_OFFSETOF(type, field) __builtin_offsetof(type, field)
#endif

namespace fa {

// The arguments of every backward kernel.
struct BwdParams {
    // Q, `[batch, seqlen_q, heads_q, head_dim]`.
    ConstTensor q;
    // K, `[batch, seqlen_k, heads_kv, head_dim]`.
    ConstTensor k;
    // V, `[batch, seqlen_k, heads_kv, head_dim_v]`.
    ConstTensor v;
    // O of the forward, `[batch, seqlen_q, heads_q, head_dim_v]`.
    ConstTensor out;
    // dO, the gradient of O, in its shape.
    ConstTensor dout;
    // dQ, in the shape of Q; written in full.
    MutTensor dq;
    // dK, in the shape of K; written in full.
    MutTensor dk;
    // dV, in the shape of V; written in full.
    MutTensor dv;
    // LSE of the forward, `[batch, heads_q, seqlen_q]` packed, natural logarithm.
    const float* lse;
    // Workspace `[batch, heads_q, m_blocks * tile_m]`: LSE in base 2; 0 for rows that saw no key, +inf
    // beyond the end.
    float* lse_log2;
    // Workspace of the same shape: the rows' sums of O * dO less dLSE; 0 beyond the end.
    float* dpsum;
    // Workspace `[batch, heads_q, m_blocks, tile_m * head_dim]` with the config's head dim: dQ before
    // its scale, each tile in the register order of the kernel that adds to it. Null where a tile has
    // all keys.
    float* dq_accum;
    // Workspace `[batch, heads_kv, n_blocks, tile_n * head_dim]`, as dq_accum; null unless head_splits >
    // 1.
    float* dk_accum;
    // Workspace `[batch, heads_kv, n_blocks, tile_n * head_dim_v]`, as dk_accum.
    float* dv_accum;
    // Workspace `[batch, heads_q, m_blocks, turns]`: the additions made so far to each tile of dQ, or to
    // each of the two parts that warps add independently. Where the first to arrive stores its sums: for
    // each warpgroup's part how many have claimed it, and whether the sums are stored. Null unless the
    // kernel is deterministic or, with several tiles of keys, first sums are stored.
    unsigned* dq_semaphores;
    // Workspace: the next tile to be drawn; null unless the kernel is deterministic or persistent.
    unsigned* tile_counter;
    // Lengths and counts.
    ShapeParams shape;
    // From products to scores.
    ScoreParams score;
    // Tiles of `tile_m` queries of a head.
    int m_blocks;
    // Tiles of `tile_n` keys of a head.
    int n_blocks;
    // Parts into which the query heads of a K/V head are divided, each a tile of its own: 1 to
    // `group_size`.
    int head_splits;
    // Tiles in all: `n_blocks * heads_kv * head_splits * batch`.
    int num_tiles;
    // K/V heads (times `head_splits`), counted over all sequences, whose Q, dO and dQ fit in L2
    // together: the size of the sections of `LongestFirst`.
    int heads_per_section;
    // Number of whole sections; the last section has the heads after them.
    int sections;
    // 1 where the first sums of a tile of dQ are stored and the others added to them (with equal lengths
    // every query then sees a key); 0 where all are added to zeros.
    int stores_dq;
    // Sequences of different lengths; kernels with `varied` only.
    VarlenParams varlen;
    // Kernels with `alibi` or `sinks` only.
    ModParams mods;
    // Kernels with `varied` only.
    PlanParams plan;
    // Workspace `[batch, heads_kv, n_blocks, 2]`: the head splits that have added to each tile of dV and
    // of dK so far; null unless deterministic with head_splits > 1.
    unsigned* dkv_semaphores;
    // The gradient of the LSE, in its shape; null for none.
    const float* dlse;
};
static_assert(sizeof(BwdParams) == 648 && alignof(BwdParams) == 8);
static_assert(FA_OFFSETOF(BwdParams, q) == 0);
static_assert(FA_OFFSETOF(BwdParams, k) == 32);
static_assert(FA_OFFSETOF(BwdParams, v) == 64);
static_assert(FA_OFFSETOF(BwdParams, out) == 96);
static_assert(FA_OFFSETOF(BwdParams, dout) == 128);
static_assert(FA_OFFSETOF(BwdParams, dq) == 160);
static_assert(FA_OFFSETOF(BwdParams, dk) == 192);
static_assert(FA_OFFSETOF(BwdParams, dv) == 224);
static_assert(FA_OFFSETOF(BwdParams, lse) == 256);
static_assert(FA_OFFSETOF(BwdParams, lse_log2) == 264);
static_assert(FA_OFFSETOF(BwdParams, dpsum) == 272);
static_assert(FA_OFFSETOF(BwdParams, dq_accum) == 280);
static_assert(FA_OFFSETOF(BwdParams, dk_accum) == 288);
static_assert(FA_OFFSETOF(BwdParams, dv_accum) == 296);
static_assert(FA_OFFSETOF(BwdParams, dq_semaphores) == 304);
static_assert(FA_OFFSETOF(BwdParams, tile_counter) == 312);
static_assert(FA_OFFSETOF(BwdParams, shape) == 320);
static_assert(FA_OFFSETOF(BwdParams, score) == 360);
static_assert(FA_OFFSETOF(BwdParams, m_blocks) == 404);
static_assert(FA_OFFSETOF(BwdParams, n_blocks) == 408);
static_assert(FA_OFFSETOF(BwdParams, head_splits) == 412);
static_assert(FA_OFFSETOF(BwdParams, num_tiles) == 416);
static_assert(FA_OFFSETOF(BwdParams, heads_per_section) == 420);
static_assert(FA_OFFSETOF(BwdParams, sections) == 424);
static_assert(FA_OFFSETOF(BwdParams, stores_dq) == 428);
static_assert(FA_OFFSETOF(BwdParams, varlen) == 432);
static_assert(FA_OFFSETOF(BwdParams, mods) == 560);
static_assert(FA_OFFSETOF(BwdParams, plan) == 592);
static_assert(FA_OFFSETOF(BwdParams, dkv_semaphores) == 632);
static_assert(FA_OFFSETOF(BwdParams, dlse) == 640);

}  // namespace fa

#undef FA_OFFSETOF
