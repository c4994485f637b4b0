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

// Strides of a tensor in units of its ragged map's last axis: see `attn/ragged.cuh`.
struct TmaStrides {
    // Between positions.
    unsigned row;
    // Between heads; of packed heads, between groups.
    unsigned head;
    // Between batch entries, or pages; 0 for packed sequences.
    unsigned entry;
};
static_assert(sizeof(TmaStrides) == 12 && alignof(TmaStrides) == 4);
static_assert(FA_OFFSETOF(TmaStrides, row) == 0);
static_assert(FA_OFFSETOF(TmaStrides, head) == 4);
static_assert(FA_OFFSETOF(TmaStrides, entry) == 8);

// Where sequences begin and end, known to the device alone. A null pointer is of no meaning for the
// problem: a sequence is then as long as `ShapeParams` says.
struct VarlenParams {
    // `[batch + 1]`: the sequences' first rows in packed Q.
    const int* cu_q;
    // `[batch + 1]`: the sequences' first rows in packed K and V.
    const int* cu_k;
    // `[batch]`: queries that are used, of those that a sequence has room for.
    const int* used_q;
    // `[batch]`: keys that are used.
    const int* used_k;
    // `[batch, table_stride]`: the pages of each sequence's keys.
    const int* page_table;
    // Counts entries of the page table that name no page; their keys read as zeros. Null for no count.
    unsigned* page_faults;
    // Keys of a page.
    int page;
    // Pages of the cache.
    int pages;
    // Entries of a row of the page table.
    int table_stride;
    // Keys of a page that one TMA box loads: the largest that divides both page and `tile_n`.
    int page_part;
    // Number of a key's page among its sequence's: the upper half of `2 key page_factor`, shifted right
    // by `page_shift`.
    unsigned page_factor;
    // See `page_factor`.
    int page_shift;
    // Rows of packed Q; 0 where sequences are padded.
    int total_q;
    // Rows of packed K and V; 0 where sequences are padded or paged.
    int total_k;
    // Of Q's map.
    TmaStrides tma_q;
    // Of K's map.
    TmaStrides tma_k;
    // Of V's map.
    TmaStrides tma_v;
    // Of dO's map; backward only.
    TmaStrides tma_do;
};
static_assert(sizeof(VarlenParams) == 128 && alignof(VarlenParams) == 8);
static_assert(FA_OFFSETOF(VarlenParams, cu_q) == 0);
static_assert(FA_OFFSETOF(VarlenParams, cu_k) == 8);
static_assert(FA_OFFSETOF(VarlenParams, used_q) == 16);
static_assert(FA_OFFSETOF(VarlenParams, used_k) == 24);
static_assert(FA_OFFSETOF(VarlenParams, page_table) == 32);
static_assert(FA_OFFSETOF(VarlenParams, page_faults) == 40);
static_assert(FA_OFFSETOF(VarlenParams, page) == 48);
static_assert(FA_OFFSETOF(VarlenParams, pages) == 52);
static_assert(FA_OFFSETOF(VarlenParams, table_stride) == 56);
static_assert(FA_OFFSETOF(VarlenParams, page_part) == 60);
static_assert(FA_OFFSETOF(VarlenParams, page_factor) == 64);
static_assert(FA_OFFSETOF(VarlenParams, page_shift) == 68);
static_assert(FA_OFFSETOF(VarlenParams, total_q) == 72);
static_assert(FA_OFFSETOF(VarlenParams, total_k) == 76);
static_assert(FA_OFFSETOF(VarlenParams, tma_q) == 80);
static_assert(FA_OFFSETOF(VarlenParams, tma_k) == 92);
static_assert(FA_OFFSETOF(VarlenParams, tma_v) == 104);
static_assert(FA_OFFSETOF(VarlenParams, tma_do) == 116);

// What joins the scores beside the mask. Null where the problem has none.
struct ModParams {
    // ALiBi slopes, `[heads_q]` or `[batch, heads_q]`.
    const float* alibi_slopes;
    // From a sequence's slopes to the next one's; 0 for slopes per head.
    long long alibi_stride;
    // Sinks, `[heads_q]`: a logit of each head that joins the denominator.
    const float* sinks;
    // Gradients of the sinks, `[heads_q]`; backward only.
    float* dsinks;
};
static_assert(sizeof(ModParams) == 32 && alignof(ModParams) == 8);
static_assert(FA_OFFSETOF(ModParams, alibi_slopes) == 0);
static_assert(FA_OFFSETOF(ModParams, alibi_stride) == 8);
static_assert(FA_OFFSETOF(ModParams, sinks) == 16);
static_assert(FA_OFFSETOF(ModParams, dsinks) == 24);

// Keys of a row divided among CTAs: their partial results, and how many.
struct SplitParams {
    // Workspace `[slots, heads, slot_rows, head_dim_v]`: O of a part of the keys, normalised.
    float* out_partial;
    // Workspace `[slots, heads, slot_rows]`: LSE of a part of the keys without the sink, natural
    // logarithm.
    float* lse_partial;
    // Parts of the keys of every row; with a work plan the most parts, of which the plan decides.
    int splits;
    // Rows of a slot: those of a tile that can exist.
    int slot_rows;
};
static_assert(sizeof(SplitParams) == 24 && alignof(SplitParams) == 8);
static_assert(FA_OFFSETOF(SplitParams, out_partial) == 0);
static_assert(FA_OFFSETOF(SplitParams, lse_partial) == 8);
static_assert(FA_OFFSETOF(SplitParams, splits) == 16);
static_assert(FA_OFFSETOF(SplitParams, slot_rows) == 20);

// The work plan of sequences of different lengths: header and lists of `attn/plan.cuh`, in one buffer.
struct PlanParams {
    // The buffer, on a multiple of 16 bytes; null without a plan.
    int* buffer;
    // The most entries of the list of tiles of queries and parts of keys, longest first.
    int items;
    // The most entries of the list of tiles whose keys are divided.
    int split_items;
    // The most entries of the list of tiles of queries; 0 for no such list.
    int m_tiles;
    // The most entries of the list of tiles of keys; 0 for no such list.
    int n_tiles;
    // Tiles that an entry stands for: the heads.
    int heads;
    // CTAs that compute at once.
    int slots;
    // By how many bits lengths, in tiles, are shifted to be sorted.
    int shift;
};
static_assert(sizeof(PlanParams) == 40 && alignof(PlanParams) == 8);
static_assert(FA_OFFSETOF(PlanParams, buffer) == 0);
static_assert(FA_OFFSETOF(PlanParams, items) == 8);
static_assert(FA_OFFSETOF(PlanParams, split_items) == 12);
static_assert(FA_OFFSETOF(PlanParams, m_tiles) == 16);
static_assert(FA_OFFSETOF(PlanParams, n_tiles) == 20);
static_assert(FA_OFFSETOF(PlanParams, heads) == 24);
static_assert(FA_OFFSETOF(PlanParams, slots) == 28);
static_assert(FA_OFFSETOF(PlanParams, shift) == 32);

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
    // Sequences of different lengths; kernels with `varied` only.
    VarlenParams varlen;
    // Kernels with `alibi` or `sinks` only.
    ModParams mods;
    // Kernels with `split` only.
    SplitParams split;
    // Kernels with `varied` only.
    PlanParams plan;
};
static_assert(sizeof(FwdParams) == 448 && alignof(FwdParams) == 8);
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
static_assert(FA_OFFSETOF(FwdParams, varlen) == 224);
static_assert(FA_OFFSETOF(FwdParams, mods) == 352);
static_assert(FA_OFFSETOF(FwdParams, split) == 384);
static_assert(FA_OFFSETOF(FwdParams, plan) == 408);

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
    // its scale, each tile in the register order of the kernel that adds to it.
    float* dq_accum;
    // Workspace `[batch, heads_kv, n_blocks, tile_n * head_dim]`, as dq_accum; null unless head_splits >
    // 1.
    float* dk_accum;
    // Workspace `[batch, heads_kv, n_blocks, tile_n * head_dim_v]`, as dk_accum.
    float* dv_accum;
    // Workspace `[batch, heads_q, m_blocks, turns]`: the contributions added to each tile of dQ so far,
    // or to each of two shares that warps add on their own; null unless deterministic.
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
    // Sequences of different lengths; kernels with `varied` only.
    VarlenParams varlen;
    // Kernels with `alibi` or `sinks` only.
    ModParams mods;
    // Kernels with `varied` only.
    PlanParams plan;
    // Workspace `[batch, heads_kv, n_blocks, 2]`: the parts of the query heads added to each tile of dV
    // and of dK so far; null unless deterministic with head_splits > 1.
    unsigned* dkv_semaphores;
    // The gradient of the LSE, in its shape; null for none.
    const float* dlse;
};
static_assert(sizeof(BwdParams) == 624 && alignof(BwdParams) == 8);
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
static_assert(FA_OFFSETOF(BwdParams, varlen) == 408);
static_assert(FA_OFFSETOF(BwdParams, mods) == 536);
static_assert(FA_OFFSETOF(BwdParams, plan) == 568);
static_assert(FA_OFFSETOF(BwdParams, dkv_semaphores) == 608);
static_assert(FA_OFFSETOF(BwdParams, dlse) == 616);

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
    // Where turned queries go; may be `q`.
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
    // Counts rows that have no place.
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
    // Keys that a sequence of the cache has room for.
    int capacity;
    // Keys of a page.
    int page;
    // Pages of the cache.
    int pages;
    // Entries of a row of the page table.
    int table_stride;
    // Elements of a row that are turned; 0 for none.
    int rotary_dim;
    // Rows of the tables.
    int positions;
    // Elements of a query that are written: the turned ones where `q_out` is `q`, else all.
    int q_columns;
    // Whether neighbours are turned together, not halves.
    int interleaved;
    // Whether the tables are f32, not in the tensors' type.
    int table_f32;
    // Whether the tensors are f16, not bf16.
    int is_f16;
    // Whether all queries of a sequence are at its first new position.
    int q_fixed;
    // Rows of a CTA.
    int rows_per_cta;
    // CTAs that take new keys; those after them take queries.
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

// A tensor map of the tensor memory accelerator, encoded by the host; opaque to the kernel.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

}  // namespace fa

#undef FA_OFFSETOF
