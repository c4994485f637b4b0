// Written by `cargo xtask codegen` from the Rust types; do not edit.
// Structs of the launch parameters.
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

// How products Q K^T become scores.
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
    // The square of the product whose score is half the cap; -1 where the terms below don't fit f32.
    float softcap_near;
    // Constant term of the polynomial in `softcap_near - product^2` by which a product below that bound
    // is multiplied to give its capped score as an exponent of 2.
    float softcap_term_0;
    // Its linear term.
    float softcap_term_1;
    // Its quadratic term.
    float softcap_term_2;
    // Its cubic term.
    float softcap_term_3;
};
static_assert(sizeof(ScoreParams) == 44 && alignof(ScoreParams) == 4);
static_assert(FA_OFFSETOF(ScoreParams, scale) == 0);
static_assert(FA_OFFSETOF(ScoreParams, scale_log2) == 4);
static_assert(FA_OFFSETOF(ScoreParams, softcap) == 8);
static_assert(FA_OFFSETOF(ScoreParams, softcap_exponent) == 12);
static_assert(FA_OFFSETOF(ScoreParams, softcap_log2) == 16);
static_assert(FA_OFFSETOF(ScoreParams, softcap_share) == 20);
static_assert(FA_OFFSETOF(ScoreParams, softcap_near) == 24);
static_assert(FA_OFFSETOF(ScoreParams, softcap_term_0) == 28);
static_assert(FA_OFFSETOF(ScoreParams, softcap_term_1) == 32);
static_assert(FA_OFFSETOF(ScoreParams, softcap_term_2) == 36);
static_assert(FA_OFFSETOF(ScoreParams, softcap_term_3) == 40);

// Strides of a tensor in units of its ragged map's last axis: see `attn/ragged.cuh`.
struct TmaStrides {
    // Between positions.
    unsigned row;
    // Between heads; between groups with `pack_gqa`.
    unsigned head;
    // Between batch entries, or pages; 0 for packed sequences.
    unsigned entry;
};
static_assert(sizeof(TmaStrides) == 12 && alignof(TmaStrides) == 4);
static_assert(FA_OFFSETOF(TmaStrides, row) == 0);
static_assert(FA_OFFSETOF(TmaStrides, head) == 4);
static_assert(FA_OFFSETOF(TmaStrides, entry) == 8);

// Starts and lengths of sequences, which only the device knows. A pointer is null where the problem has
// no such tensor: the lengths are then those of `ShapeParams`.
struct VarlenParams {
    // `[batch + 1]`: the sequences' first rows in packed Q.
    const int* cu_q;
    // `[batch + 1]`: the sequences' first rows in packed K and V.
    const int* cu_k;
    // `[batch]`: queries in use of each sequence.
    const int* used_q;
    // `[batch]`: keys in use of each sequence.
    const int* used_k;
    // `[batch, table_stride]`: the pages of each sequence's keys.
    const int* page_table;
    // Counts page table entries that are not a page of the cache; their keys read as zeros. May be null.
    unsigned* page_faults;
    // Keys of a page.
    int page;
    // Pages of the cache.
    int pages;
    // Entries of a row of the page table.
    int table_stride;
    // Keys of a page that one TMA box loads: the largest that divides both page and `tile_n`.
    int page_part;
    // Index of a key's page in its sequence: the upper half of `2 key page_factor`, shifted right by
    // `page_shift`.
    unsigned page_factor;
    // See `page_factor`.
    int page_shift;
    // Rows of packed Q; 0 where sequences are padded.
    int total_q;
    // Rows of packed K and V; 0 where sequences are padded or paged.
    int total_k;
    // Strides of Q's map.
    TmaStrides tma_q;
    // Strides of K's map.
    TmaStrides tma_k;
    // Strides of V's map.
    TmaStrides tma_v;
    // Strides of dO's map; backward only.
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

// Tensors that change the scores. A pointer is null where the problem has no such tensor.
struct ModParams {
    // ALiBi slopes, `[heads_q]` or `[batch, heads_q]`.
    const float* alibi_slopes;
    // Distance between the slopes of two sequences; 0 for slopes per head.
    long long alibi_stride;
    // Sinks, `[heads_q]`: one more logit per head that joins the softmax denominator.
    const float* sinks;
    // Gradients of the sinks, `[heads_q]`; backward only.
    float* dsinks;
};
static_assert(sizeof(ModParams) == 32 && alignof(ModParams) == 8);
static_assert(FA_OFFSETOF(ModParams, alibi_slopes) == 0);
static_assert(FA_OFFSETOF(ModParams, alibi_stride) == 8);
static_assert(FA_OFFSETOF(ModParams, sinks) == 16);
static_assert(FA_OFFSETOF(ModParams, dsinks) == 24);

// Split keys: the partial results, and the number of splits.
struct SplitParams {
    // Workspace `[slots, heads, slot_rows, head_dim_v]`: O of a part of the keys, normalised.
    float* out_partial;
    // Workspace `[slots, heads, slot_rows]`: LSE of a part of the keys without the sink, natural
    // logarithm.
    float* lse_partial;
    // Partial results of every tile in the workspace: its splits, or the clusters of CTAs that share
    // them; with a work plan an upper bound on the splits, since the plan decides.
    int splits;
    // Rows per slot: the most that a tile can have.
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
    // Capacity of the list of tiles of queries with their parts of the keys, longest first.
    int items;
    // Capacity of the list of tiles whose keys are split.
    int split_items;
    // Capacity of the list of tiles of queries; 0 for no such list.
    int m_tiles;
    // Capacity of the list of tiles of keys; 0 for no such list.
    int n_tiles;
    // Tiles that an entry stands for: one per head.
    int heads;
    // CTAs that are resident at once.
    int slots;
    // Bits by which lengths in tiles are shifted right before they are sorted.
    int shift;
    // Ints from the plan of a CTA to the next one's, where the CTAs of a forward, at most `slots`, plan
    // for themselves; 0 where all read one plan.
    int own_ints;
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
static_assert(FA_OFFSETOF(PlanParams, own_ints) == 36);

// A tensor map of the tensor memory accelerator, encoded by the host; opaque to the kernel.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

}  // namespace fa

#undef FA_OFFSETOF
