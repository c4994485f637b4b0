// Written by `cargo xtask codegen` from the Rust types; do not edit.
// The parameters of a launch.
#pragma once

#ifdef __CUDACC_RTC__
#define FA_OFFSETOF(type, field) __INTADDR__(&((type*)0)->field)
#else
#define FA_OFFSETOF(type, field) __builtin_offsetof(type, field)
#endif

namespace fa {

// Distances in elements between neighbours of a `[batch, seqlen, heads, head_dim]` tensor; the head dim
// is contiguous.
struct RowStrides {
    // Between batch entries.
    long long batch;
    // Between positions of the sequence.
    long long seq;
    // Between heads.
    long long head;
};
static_assert(sizeof(RowStrides) == 24 && alignof(RowStrides) == 8);
static_assert(FA_OFFSETOF(RowStrides, batch) == 0);
static_assert(FA_OFFSETOF(RowStrides, seq) == 8);
static_assert(FA_OFFSETOF(RowStrides, head) == 16);

// A tensor that a kernel reads: its element `[0, 0, 0, 0]` and its strides.
struct ConstTensor {
    // The first element, on a multiple of 16 bytes.
    const void* data;
    // In elements.
    RowStrides strides;
};
static_assert(sizeof(ConstTensor) == 32 && alignof(ConstTensor) == 8);
static_assert(FA_OFFSETOF(ConstTensor, data) == 0);
static_assert(FA_OFFSETOF(ConstTensor, strides) == 8);

// A tensor that a kernel writes.
struct MutTensor {
    // The first element, on a multiple of 16 bytes.
    void* data;
    // In elements.
    RowStrides strides;
};
static_assert(sizeof(MutTensor) == 32 && alignof(MutTensor) == 8);
static_assert(FA_OFFSETOF(MutTensor, data) == 0);
static_assert(FA_OFFSETOF(MutTensor, strides) == 8);

// The problem's lengths, counts and window.
struct ShapeParams {
    // Independent sequences.
    int batch;
    // Query heads.
    int heads_q;
    // Key and value heads.
    int heads_kv;
    // Query heads per K/V head: `heads_q / heads_kv`.
    int group_size;
    // Queries per sequence.
    int seqlen_q;
    // Keys per sequence.
    int seqlen_k;
    // Elements of a query or key: a multiple of 8 up to the config's `head_dim`.
    int head_dim;
    // Elements of a value or output row: a multiple of 8 up to the config's `head_dim_v`.
    int head_dim_v;
    // Visible keys left of the diagonal (key = query + seqlen_k - seqlen_q); -1 for all. Window kernels
    // only.
    int window_left;
    // Visible keys right of the diagonal; -1 for all. Window kernels only.
    int window_right;
};
static_assert(sizeof(ShapeParams) == 40 && alignof(ShapeParams) == 4);
static_assert(FA_OFFSETOF(ShapeParams, batch) == 0);
static_assert(FA_OFFSETOF(ShapeParams, heads_q) == 4);
static_assert(FA_OFFSETOF(ShapeParams, heads_kv) == 8);
static_assert(FA_OFFSETOF(ShapeParams, group_size) == 12);
static_assert(FA_OFFSETOF(ShapeParams, seqlen_q) == 16);
static_assert(FA_OFFSETOF(ShapeParams, seqlen_k) == 20);
static_assert(FA_OFFSETOF(ShapeParams, head_dim) == 24);
static_assert(FA_OFFSETOF(ShapeParams, head_dim_v) == 28);
static_assert(FA_OFFSETOF(ShapeParams, window_left) == 32);
static_assert(FA_OFFSETOF(ShapeParams, window_right) == 36);

// How products of queries and keys become scores.
struct ScoreParams {
    // Factor on Q K^T.
    float scale;
    // `scale * log2(e)`: from scores to exponents of 2.
    float scale_log2;
    // `cap` of `cap * tanh(scale * s / cap)`; kernels with `softcap` only.
    float softcap;
    // `2 * log2(e) * scale / softcap`: from products to the exponent of 2 in the cap's tanh.
    float softcap_exponent;
    // `log2(e) * softcap`: from shares of the cap to exponents of 2.
    float softcap_log2;
    // `ln(2) / softcap`: from exponents of 2 to shares of the cap.
    float softcap_share;
};
static_assert(sizeof(ScoreParams) == 24 && alignof(ScoreParams) == 4);
static_assert(FA_OFFSETOF(ScoreParams, scale) == 0);
static_assert(FA_OFFSETOF(ScoreParams, scale_log2) == 4);
static_assert(FA_OFFSETOF(ScoreParams, softcap) == 8);
static_assert(FA_OFFSETOF(ScoreParams, softcap_exponent) == 12);
static_assert(FA_OFFSETOF(ScoreParams, softcap_log2) == 16);
static_assert(FA_OFFSETOF(ScoreParams, softcap_share) == 20);

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
    // Tiles of `tile_m` rows of a head (of `seqlen_q * group_size` rows with `pack_gqa`), rounded up to
    // `cluster_m`.
    int m_blocks;
    // Tiles in all: `m_blocks * heads * batch`, with `heads_kv` for heads under `pack_gqa`.
    int num_tiles;
    // Heads, counted through all sequences, whose K and V fit the L2 cache together: the sections of
    // `LongestFirst`.
    int heads_per_section;
    // Sections of `heads_per_section` heads; the last section is the heads after them.
    int sections;
};
static_assert(sizeof(FwdParams) == 224 && alignof(FwdParams) == 8);
static_assert(FA_OFFSETOF(FwdParams, q) == 0);
static_assert(FA_OFFSETOF(FwdParams, k) == 32);
static_assert(FA_OFFSETOF(FwdParams, v) == 64);
static_assert(FA_OFFSETOF(FwdParams, out) == 96);
static_assert(FA_OFFSETOF(FwdParams, lse) == 128);
static_assert(FA_OFFSETOF(FwdParams, tile_counter) == 136);
static_assert(FA_OFFSETOF(FwdParams, shape) == 144);
static_assert(FA_OFFSETOF(FwdParams, score) == 184);
static_assert(FA_OFFSETOF(FwdParams, m_blocks) == 208);
static_assert(FA_OFFSETOF(FwdParams, num_tiles) == 212);
static_assert(FA_OFFSETOF(FwdParams, heads_per_section) == 216);
static_assert(FA_OFFSETOF(FwdParams, sections) == 220);

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
    // Workspace of the same shape: the rows' sums of O * dO; 0 beyond the end.
    float* dpsum;
    // Workspace `[batch, heads_q, m_blocks, tile_m * head_dim]` with the config's head dim: dQ before
    // its scale, each tile in the register order of the kernel that adds to it.
    float* dq_accum;
    // Workspace `[batch, heads_kv, n_blocks, tile_n * head_dim]`, as dq_accum; null unless head_splits >
    // 1.
    float* dk_accum;
    // Workspace `[batch, heads_kv, n_blocks, tile_n * head_dim_v]`, as dk_accum.
    float* dv_accum;
    // Workspace `[batch, heads_q, m_blocks]`: the contributions added to each tile of dQ so far; null
    // unless deterministic.
    unsigned* dq_semaphores;
    // Workspace: the next tile to be drawn; null unless deterministic.
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
    // K/V heads (times `head_splits`), counted through all sequences, whose Q, dO and dQ fit the L2
    // cache together: the sections of `LongestFirst`.
    int heads_per_section;
    // Sections of `heads_per_section` heads; the last section is the heads after them.
    int sections;
    // Workspace `[batch, heads_kv, n_blocks, 2]`: the parts of the query heads added to each tile of dV
    // and of dK so far; null unless deterministic with head_splits > 1.
    unsigned* dkv_semaphores;
};
static_assert(sizeof(BwdParams) == 416 && alignof(BwdParams) == 8);
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
static_assert(FA_OFFSETOF(BwdParams, m_blocks) == 384);
static_assert(FA_OFFSETOF(BwdParams, n_blocks) == 388);
static_assert(FA_OFFSETOF(BwdParams, head_splits) == 392);
static_assert(FA_OFFSETOF(BwdParams, num_tiles) == 396);
static_assert(FA_OFFSETOF(BwdParams, heads_per_section) == 400);
static_assert(FA_OFFSETOF(BwdParams, sections) == 404);
static_assert(FA_OFFSETOF(BwdParams, dkv_semaphores) == 408);

// A tensor map of the tensor memory accelerator, encoded by the host; opaque to the kernel.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

}  // namespace fa

#undef FA_OFFSETOF
