// Written by `cargo xtask codegen` from the Rust types; do not edit.
// What a kernel is told at launch.
#pragma once

#ifdef __CUDACC_RTC__
#define FA_OFFSETOF(type, field) __INTADDR__(&((type*)0)->field)
#else
#define FA_OFFSETOF(type, field) __builtin_offsetof(type, field)
#endif

namespace fa {

// Distances in elements between neighbours of a `[batch, seqlen, heads, head_dim]` tensor; the head dim is contiguous.
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

// What every forward kernel is told at launch.
struct FwdParams {
    // Q, `[batch, seqlen_q, heads_q, head_dim]` by `q_strides`.
    const void* q;
    // K, `[batch, seqlen_k, heads_kv, head_dim]` by `k_strides`.
    const void* k;
    // V, `[batch, seqlen_k, heads_kv, head_dim_v]` by `v_strides`.
    const void* v;
    // O, `[batch, seqlen_q, heads_q, head_dim_v]` by `out_strides`; written in full.
    void* out;
    // LSE, `[batch, heads_q, seqlen_q]` packed, natural logarithm; null for none.
    float* lse;
    // The next tile to be drawn, 0 at launch; null unless the scheduler is dynamic.
    unsigned* tile_counter;
    // Strides of Q.
    RowStrides q_strides;
    // Strides of K.
    RowStrides k_strides;
    // Strides of V.
    RowStrides v_strides;
    // Strides of O.
    RowStrides out_strides;
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
    // Visible keys left of the diagonal (key = query + seqlen_k - seqlen_q); -1 for all. Window kernels only.
    int window_left;
    // Visible keys right of the diagonal; -1 for all. Window kernels only.
    int window_right;
    // Factor on Q K^T.
    float scale;
    // `scale * log2(e)`: from scores to exponents of 2.
    float scale_log2;
    // `cap` of `cap * tanh(scale * s / cap)`; kernels with `softcap` only.
    float softcap;
    // Tiles of `tile_m` rows of a head (of `seqlen_q * group_size` rows with `pack_gqa`), rounded up to `cluster_m`.
    int m_blocks;
    // Tiles in all: `m_blocks * heads * batch`, with `heads_kv` for heads under `pack_gqa`.
    int num_tiles;
    // Heads, counted through all sequences, whose K and V fit the L2 cache together: the sections of `LongestFirst`.
    int heads_per_section;
    // Sections of `heads_per_section` heads; the last section is the heads after them.
    int sections;
};
static_assert(sizeof(FwdParams) == 216 && alignof(FwdParams) == 8);
static_assert(FA_OFFSETOF(FwdParams, q) == 0);
static_assert(FA_OFFSETOF(FwdParams, k) == 8);
static_assert(FA_OFFSETOF(FwdParams, v) == 16);
static_assert(FA_OFFSETOF(FwdParams, out) == 24);
static_assert(FA_OFFSETOF(FwdParams, lse) == 32);
static_assert(FA_OFFSETOF(FwdParams, tile_counter) == 40);
static_assert(FA_OFFSETOF(FwdParams, q_strides) == 48);
static_assert(FA_OFFSETOF(FwdParams, k_strides) == 72);
static_assert(FA_OFFSETOF(FwdParams, v_strides) == 96);
static_assert(FA_OFFSETOF(FwdParams, out_strides) == 120);
static_assert(FA_OFFSETOF(FwdParams, batch) == 144);
static_assert(FA_OFFSETOF(FwdParams, heads_q) == 148);
static_assert(FA_OFFSETOF(FwdParams, heads_kv) == 152);
static_assert(FA_OFFSETOF(FwdParams, group_size) == 156);
static_assert(FA_OFFSETOF(FwdParams, seqlen_q) == 160);
static_assert(FA_OFFSETOF(FwdParams, seqlen_k) == 164);
static_assert(FA_OFFSETOF(FwdParams, head_dim) == 168);
static_assert(FA_OFFSETOF(FwdParams, head_dim_v) == 172);
static_assert(FA_OFFSETOF(FwdParams, window_left) == 176);
static_assert(FA_OFFSETOF(FwdParams, window_right) == 180);
static_assert(FA_OFFSETOF(FwdParams, scale) == 184);
static_assert(FA_OFFSETOF(FwdParams, scale_log2) == 188);
static_assert(FA_OFFSETOF(FwdParams, softcap) == 192);
static_assert(FA_OFFSETOF(FwdParams, m_blocks) == 196);
static_assert(FA_OFFSETOF(FwdParams, num_tiles) == 200);
static_assert(FA_OFFSETOF(FwdParams, heads_per_section) == 204);
static_assert(FA_OFFSETOF(FwdParams, sections) == 208);

// What every backward kernel is told at launch.
struct BwdParams {
    // Q, `[batch, seqlen_q, heads_q, head_dim]` by `q_strides`.
    const void* q;
    // K, `[batch, seqlen_k, heads_kv, head_dim]` by `k_strides`.
    const void* k;
    // V, `[batch, seqlen_k, heads_kv, head_dim_v]` by `v_strides`.
    const void* v;
    // O of the forward, `[batch, seqlen_q, heads_q, head_dim_v]` by `out_strides`.
    const void* out;
    // dO, the gradient of O, in its shape by `dout_strides`.
    const void* dout;
    // dQ, in the shape of Q by `dq_strides`; written in full.
    void* dq;
    // dK, in the shape of K by `dk_strides`; written in full.
    void* dk;
    // dV, in the shape of V by `dv_strides`; written in full.
    void* dv;
    // LSE of the forward, `[batch, heads_q, seqlen_q]` packed, natural logarithm.
    const float* lse;
    // Workspace `[batch, heads_q, m_blocks * tile_m]`: LSE in base 2; 0 for rows that saw no key, +inf beyond the end.
    float* lse_log2;
    // Workspace of the same shape: the rows' sums of O * dO; 0 beyond the end.
    float* dpsum;
    // Workspace `[batch, heads_q, m_blocks, tile_m * head_dim]` with the config's head dim: dQ before its scale, a tile in the register order of the kernel that adds to it.
    float* dq_accum;
    // Workspace `[batch, heads_kv, n_blocks, tile_n * head_dim]`, as dq_accum; null unless head_splits > 1.
    float* dk_accum;
    // Workspace `[batch, heads_kv, n_blocks, tile_n * head_dim_v]`, as dk_accum.
    float* dv_accum;
    // Workspace `[batch, heads_q, m_blocks]`: how many blocks of keys have been added to each tile of dQ; null unless deterministic.
    unsigned* dq_turns;
    // Workspace: the next tile to be drawn; null unless deterministic.
    unsigned* tile_counter;
    // Strides of Q.
    RowStrides q_strides;
    // Strides of K.
    RowStrides k_strides;
    // Strides of V.
    RowStrides v_strides;
    // Strides of O.
    RowStrides out_strides;
    // Strides of dO.
    RowStrides dout_strides;
    // Strides of dQ.
    RowStrides dq_strides;
    // Strides of dK.
    RowStrides dk_strides;
    // Strides of dV.
    RowStrides dv_strides;
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
    // Visible keys left of the diagonal (key = query + seqlen_k - seqlen_q); -1 for all. Window kernels only.
    int window_left;
    // Visible keys right of the diagonal; -1 for all. Window kernels only.
    int window_right;
    // Factor on Q K^T.
    float scale;
    // `scale * log2(e)`: from scores to exponents of 2.
    float scale_log2;
    // `cap` of `cap * tanh(scale * s / cap)`; kernels with `softcap` only.
    float softcap;
    // Tiles of `tile_m` queries of a head.
    int m_blocks;
    // Tiles of `tile_n` keys of a head.
    int n_blocks;
    // Parts into which the query heads of a K/V head are divided, each a tile of its own: 1 to `group_size`.
    int head_splits;
    // Tiles in all: `n_blocks * heads_kv * head_splits * batch`.
    int num_tiles;
    // K/V heads (times `head_splits`), counted through all sequences, whose Q, dO and dQ fit the L2 cache together: the sections of `LongestFirst`.
    int heads_per_section;
    // Sections of so many heads; the heads that are left make up the last one.
    int sections;
};
static_assert(sizeof(BwdParams) == 400 && alignof(BwdParams) == 8);
static_assert(FA_OFFSETOF(BwdParams, q) == 0);
static_assert(FA_OFFSETOF(BwdParams, k) == 8);
static_assert(FA_OFFSETOF(BwdParams, v) == 16);
static_assert(FA_OFFSETOF(BwdParams, out) == 24);
static_assert(FA_OFFSETOF(BwdParams, dout) == 32);
static_assert(FA_OFFSETOF(BwdParams, dq) == 40);
static_assert(FA_OFFSETOF(BwdParams, dk) == 48);
static_assert(FA_OFFSETOF(BwdParams, dv) == 56);
static_assert(FA_OFFSETOF(BwdParams, lse) == 64);
static_assert(FA_OFFSETOF(BwdParams, lse_log2) == 72);
static_assert(FA_OFFSETOF(BwdParams, dpsum) == 80);
static_assert(FA_OFFSETOF(BwdParams, dq_accum) == 88);
static_assert(FA_OFFSETOF(BwdParams, dk_accum) == 96);
static_assert(FA_OFFSETOF(BwdParams, dv_accum) == 104);
static_assert(FA_OFFSETOF(BwdParams, dq_turns) == 112);
static_assert(FA_OFFSETOF(BwdParams, tile_counter) == 120);
static_assert(FA_OFFSETOF(BwdParams, q_strides) == 128);
static_assert(FA_OFFSETOF(BwdParams, k_strides) == 152);
static_assert(FA_OFFSETOF(BwdParams, v_strides) == 176);
static_assert(FA_OFFSETOF(BwdParams, out_strides) == 200);
static_assert(FA_OFFSETOF(BwdParams, dout_strides) == 224);
static_assert(FA_OFFSETOF(BwdParams, dq_strides) == 248);
static_assert(FA_OFFSETOF(BwdParams, dk_strides) == 272);
static_assert(FA_OFFSETOF(BwdParams, dv_strides) == 296);
static_assert(FA_OFFSETOF(BwdParams, batch) == 320);
static_assert(FA_OFFSETOF(BwdParams, heads_q) == 324);
static_assert(FA_OFFSETOF(BwdParams, heads_kv) == 328);
static_assert(FA_OFFSETOF(BwdParams, group_size) == 332);
static_assert(FA_OFFSETOF(BwdParams, seqlen_q) == 336);
static_assert(FA_OFFSETOF(BwdParams, seqlen_k) == 340);
static_assert(FA_OFFSETOF(BwdParams, head_dim) == 344);
static_assert(FA_OFFSETOF(BwdParams, head_dim_v) == 348);
static_assert(FA_OFFSETOF(BwdParams, window_left) == 352);
static_assert(FA_OFFSETOF(BwdParams, window_right) == 356);
static_assert(FA_OFFSETOF(BwdParams, scale) == 360);
static_assert(FA_OFFSETOF(BwdParams, scale_log2) == 364);
static_assert(FA_OFFSETOF(BwdParams, softcap) == 368);
static_assert(FA_OFFSETOF(BwdParams, m_blocks) == 372);
static_assert(FA_OFFSETOF(BwdParams, n_blocks) == 376);
static_assert(FA_OFFSETOF(BwdParams, head_splits) == 380);
static_assert(FA_OFFSETOF(BwdParams, num_tiles) == 384);
static_assert(FA_OFFSETOF(BwdParams, heads_per_section) == 388);
static_assert(FA_OFFSETOF(BwdParams, sections) == 392);

// A tensor map of the tensor memory accelerator, encoded by the host; opaque to the kernel.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

}  // namespace fa

#undef FA_OFFSETOF
