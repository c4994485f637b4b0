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
};
static_assert(sizeof(FwdParams) == 208 && alignof(FwdParams) == 8);
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

// A tensor map of the tensor memory accelerator, encoded by the host; opaque to the kernel.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

}  // namespace fa

#undef FA_OFFSETOF
