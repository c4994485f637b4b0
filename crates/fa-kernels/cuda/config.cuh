// Written by `cargo xtask codegen` from the Rust types; do not edit.
// A kernel's compile-time parameters: the template argument of its kernel.
#pragma once

namespace fa {

enum class Dtype { F32, F16, Bf16, E4m3, Int8, Int4, E5m2 };

enum class MaskKind { Full, Causal, Window };

enum class Scheduler { PerTile, Static, Dynamic };

enum class TileOrder { Natural, LongestFirst };

// Parameters of the SM80-class forward. Each optimisation is a switch, so that it can be measured alone.
struct Sm80FwdConfig {
    // Type of Q and O, and of the tiles of K and V.
    Dtype dtype;
    // Tile extent of the head dim of Q and K.
    int head_dim;
    // Tile extent of the head dim of V and O.
    int head_dim_v;
    // The mask that there is code for.
    MaskKind mask;
    // Scores become cap * tanh(s / cap).
    bool softcap;
    // Lengths and starts of sequences are read on the device.
    bool varied;
    // K and V are in pages, found through a page table.
    bool paged;
    // slope * |i + seqlen_k - seqlen_q - j| is subtracted from scores.
    bool alibi;
    // A logit per query head joins the softmax denominator.
    bool sinks;
    // Split keys: several CTAs share the keys of a tile.
    bool split;
    // Query rows of a CTA; a multiple of `16 * num_warps` up to 256, or 16 or 32 with `divide_keys`.
    int tile_m;
    // Keys per step; a multiple of 16 up to 256.
    int tile_n;
    // Warps of a CTA, 1 to 16; each owns `tile_m / num_warps` rows, or keys with `divide_keys`.
    int num_warps;
    // K/V buffers in flight, 1 to 4; a step waits for all but the newest copies.
    int stages;
    // Keep the Q fragments in registers for the whole mainloop.
    bool q_in_regs;
    // Resident CTAs per SM that the compiler is asked to leave registers for, 1 to 8.
    int blocks_per_sm;
    // XOR-swizzled shared memory instead of plain row-major rows.
    bool swizzle;
    // ldmatrix instead of plain 32-bit fragment loads.
    bool ldmatrix;
    // exp2 with the scale folded into one multiply-add instead of exp of scaled scores.
    bool exp2;
    // Flush-to-zero exponentials, and approximate division unless `exact_div`.
    bool fast_math;
    // Separate loops for masked and unmasked tiles instead of a mask on every tile.
    bool loop_split;
    // Last query tiles first, so that the causal mask's longest tiles start earliest.
    bool reverse_blocks;
    // Fold the query heads of a K/V head into the rows of a tile, which takes as many queries as fit
    // with all of their heads.
    bool pack_gqa;
    // With `fast_math`: divide exactly at the end all the same.
    bool exact_div;
    // The warps divide the keys of a step, 16 or 32 to each, and each has all rows: for few rows, as in
    // decoding. Codes are converted in registers.
    bool divide_keys;
    // Type of K and V in device memory: `dtype`, or codes.
    Dtype kv_dtype;
};

// Parameters of the SM90 forward.
struct Sm90FwdConfig {
    // Type of Q and O, and of the tiles of K and V.
    Dtype dtype;
    // Tile extent of the head dim of Q and K.
    int head_dim;
    // Tile extent of the head dim of V and O.
    int head_dim_v;
    // The mask that there is code for.
    MaskKind mask;
    // Scores become cap * tanh(s / cap).
    bool softcap;
    // Lengths and starts of sequences are read on the device.
    bool varied;
    // K and V are in pages, found through a page table.
    bool paged;
    // slope * |i + seqlen_k - seqlen_q - j| is subtracted from scores.
    bool alibi;
    // A logit per query head joins the softmax denominator.
    bool sinks;
    // Split keys: several CTAs share the keys of a tile.
    bool split;
    // Query rows per CTA: `64 * num_wg`.
    int tile_m;
    // Keys per step; a multiple of 16 up to 256.
    int tile_n;
    // Consumer warpgroups, 1 to 3; one more is the producer.
    int num_wg;
    // P as a register operand of P V instead of through shared memory.
    bool pv_is_rs;
    // Issue S of the next step before P V of this one (overlap within a warpgroup).
    bool overlap_wg;
    // Q buffers, 1 or 2: with 2, the next tile's Q is loaded while this one's is in use.
    int q_stages;
    // K and V buffers in flight, 1 to 4.
    int kv_stages;
    // Warpgroups take turns at the tensor cores: the softmax of one runs under the products of another.
    bool ping_pong;
    // How tiles are assigned to CTAs.
    Scheduler scheduler;
    // The order of tiles.
    TileOrder tile_order;
    // CTAs per cluster, which share K/V loads by multicast: 1 or 2 (2 under the full mask only, where
    // neighbours load the same keys).
    int cluster_m;
    // How many of every 16 exponentials are polynomials on the FMA units: 0 to 16.
    int exp_poly_of_16;
    // Rescale O only when the running maximum grew by more than this many powers of 2, 0 to 15; 0
    // rescales whenever it grew. With `pv_is_rs` and `overlap_wg` no maximum is taken until the sum of a
    // tile's probabilities P shows that it grew that far. Beyond 15, P would leave f16.
    int rescale_threshold;
    // Fold the query heads of a K/V head into the rows of a tile, which takes as many queries as fit
    // with all of their heads.
    bool pack_gqa;
    // Rows of paged keys are copied by the producer's threads, for pages of any size, instead of by TMA
    // with a box for each part of a page. Requires equal panels of K and V.
    bool gather;
    // CTAs that share an SM and its registers, 1 to 4: with more, one loads and stores while others
    // compute.
    int blocks_per_sm;
    // P is computed against the current maximum, and its sum shows whether the scores have outgrown it. In
    // tiles where they have not (nearly all) no maximum is taken and O is not rescaled. Any reference within
    // 2^rescale_threshold of the maximum gives the same relative precision.
    bool lazy_max;
    // In tiles whose scores are all at most half the soft cap, the cap is a polynomial, on the FMA units
    // alone (NB-080). Both paths need registers beside S, P and O.
    bool near_cap;
    // A warpgroup skips tiles of keys that only rows of later warpgroups see. It releases the K of all
    // skipped tiles, at most two, before it waits for the first V; this needs two stages.
    bool skips_blocks;
    // V's tiles begin on a sector (fwd_shift.cuh): not where O's store would then spill.
    bool shifts_values;
    // Type of K and V in device memory: `dtype`, or codes.
    Dtype kv_dtype;
    // Stages of codes in flight; 0 for K and V of 16 bits.
    int code_stages;
    // CTAs list their work themselves where a call brings no plan and tiles are few
    // (attn/plan_few.cuh).
    bool own_plan;
};

// Parameters of the SM80-class backward. A CTA owns `tile_n` keys and loops over the tiles of `tile_m`
// queries that see them.
//
// Each of the five products of a step (see `Sm90Bwd`) is divided among the warps into whole 16 x 16
// blocks.
struct Sm80BwdConfig {
    // Type of Q and O, and of the tiles of K and V.
    Dtype dtype;
    // Tile extent of the head dim of Q and K.
    int head_dim;
    // Tile extent of the head dim of V and O.
    int head_dim_v;
    // The mask that there is code for.
    MaskKind mask;
    // Scores become cap * tanh(s / cap).
    bool softcap;
    // Lengths and starts of sequences are read on the device.
    bool varied;
    // K and V are in pages, found through a page table.
    bool paged;
    // slope * |i + seqlen_k - seqlen_q - j| is subtracted from scores.
    bool alibi;
    // A logit per query head joins the softmax denominator.
    bool sinks;
    // Split keys: several CTAs share the keys of a tile.
    bool split;
    // Queries per step; a multiple of 16 from 32 to 128.
    int tile_m;
    // Keys per CTA; a multiple of 16 up to 128.
    int tile_n;
    // Warps, an even number from 2 to 8: half are P warps (P, dV), half are dS warps (dS, dK).
    int num_warps;
    // Q buffers, 2 or 3: P is one step ahead. With 2, the next Q arrives during the step that needs it.
    int q_stages;
    // dO buffers, 1 or 2.
    int do_stages;
    // Warps of a group along `tile_m` in S and dP; divides `num_warps / 2`.
    int atom_layout_m_sdp;
    // Warps of a group along `tile_n` in dK and dV; divides `num_warps / 2`.
    int atom_layout_n_dkv;
    // Warps of a group along `tile_m` in dQ; divides `num_warps / 2`.
    int atom_layout_m_dq;
    // Columns of dQ that the P warps compute, fewer than the head dim; the dS warps compute the others.
    int dq_first;
    // Resident CTAs per SM that the register budget is set for, 1 to 4.
    int blocks_per_sm;
    // The order of tiles.
    TileOrder tile_order;
    // Key tiles add to dQ in a fixed order, so that equal inputs give equal bits.
    bool deterministic;
};

// Parameters of the SM90 backward. A CTA owns `tile_n` keys and loops over the tiles of `tile_m` queries
// that see them.
//
// A step has five products: S and dP (`[tile_m, tile_n]`), dK and dV (`[tile_n, head dim]`) and dQ
// (`[tile_m, head dim]`). Each can be computed transposed (swap_ab), and its rows or its columns are
// divided among the warpgroups (atom layout).
struct Sm90BwdConfig {
    // Type of Q and O, and of the tiles of K and V.
    Dtype dtype;
    // Tile extent of the head dim of Q and K.
    int head_dim;
    // Tile extent of the head dim of V and O.
    int head_dim_v;
    // The mask that there is code for.
    MaskKind mask;
    // Scores become cap * tanh(s / cap).
    bool softcap;
    // Lengths and starts of sequences are read on the device.
    bool varied;
    // K and V are in pages, found through a page table.
    bool paged;
    // slope * |i + seqlen_k - seqlen_q - j| is subtracted from scores.
    bool alibi;
    // A logit per query head joins the softmax denominator.
    bool sinks;
    // Split keys: several CTAs share the keys of a tile.
    bool split;
    // Queries per step; a multiple of 16 from 32 to 128.
    int tile_m;
    // Keys per CTA; a multiple of 16 up to 128.
    int tile_n;
    // Consumer warpgroups, 2 or 3; one more is the producer, which also adds dQ to device memory.
    int num_wg;
    // Q buffers, 1 or 2.
    int q_stages;
    // dO buffers, 1 or 2.
    int do_stages;
    // Buffers of P and dS, 1 or 2; with 2 a step has one barrier over the warpgroups instead of two.
    int pds_stages;
    // Compute S and dP transposed.
    bool sdp_swap_ab;
    // Compute dK and dV transposed.
    bool dkv_swap_ab;
    // Compute dQ transposed.
    bool dq_swap_ab;
    // Warpgroups along `tile_m` in S and dP: 1 or `num_wg`.
    int atom_layout_m_sdp;
    // Warpgroups along `tile_n` in dK and dV: 1 or `num_wg`.
    int atom_layout_n_dkv;
    // Warpgroups along `tile_m` in dQ: 1 or `num_wg`.
    int atom_layout_m_dq;
    // P and dS as register operands of dV and dK instead of through shared memory.
    bool mma_dkv_is_rs;
    // dQ is added to device memory from shared memory by TMA; otherwise by vector atomics from
    // registers.
    bool dq_via_smem;
    // Parts in which dQ is computed, one after the other in the same registers: 1 or 2.
    int dq_slices;
    // The order of tiles.
    TileOrder tile_order;
    // Key tiles add to dQ in a fixed order, so that equal inputs give equal bits.
    bool deterministic;
    // One CTA per SM, which draws tiles from a counter: the next tile's loads run under the end of the
    // current one, whose dK and dV are stored through the buffer of dS.
    bool persistent;
    // A tile has all keys of its sequence, of equal lengths: dQ goes from registers to its tensor in 16
    // bits, without accumulators and without a launch that converts them.
    bool whole_keys;
    // The first sums of a tile of dQ can be stored, by bulk copies, instead of added to zeros (NB-082). With
    // equal lengths the tile of keys that stores was drawn before the others: the first one under a full
    // mask; under a causal mask or a window the last one that the queries see, as tiles are drawn with the
    // last keys first. With lengths on the device, and under a program's mask, it is the first to arrive, or
    // in deterministic kernels with lengths on the device the one whose turn comes first (NB-093, NB-208).
    bool may_store_dq;
};

// Parameters of the SM100 forward, which was assembled and emulated, and never run on a GPU.
struct Sm100FwdConfig {
    // Type of Q and O, and of the tiles of K and V.
    Dtype dtype;
    // Tile extent of the head dim of Q and K.
    int head_dim;
    // Tile extent of the head dim of V and O.
    int head_dim_v;
    // The mask that there is code for.
    MaskKind mask;
    // Scores become cap * tanh(s / cap).
    bool softcap;
    // Lengths and starts of sequences are read on the device.
    bool varied;
    // K and V are in pages, found through a page table.
    bool paged;
    // slope * |i + seqlen_k - seqlen_q - j| is subtracted from scores.
    bool alibi;
    // A logit per query head joins the softmax denominator.
    bool sinks;
    // Split keys: several CTAs share the keys of a tile.
    bool split;
    // Query rows of a CTA: `128 * q_tiles`.
    int tile_m;
    // Keys per step; a multiple of 32 up to 128.
    int tile_n;
    // Tiles of 128 queries that share K and V, 1 or 2: with 2, the softmax of one runs under the
    // products of the other.
    int q_tiles;
    // Slots of the ring that tiles of K and V use in turn, 2 to 12.
    int kv_stages;
    // How tiles are assigned to CTAs: `PerTile` or `Static`.
    Scheduler scheduler;
    // The order of tiles.
    TileOrder tile_order;
    // How many of every 16 exponentials are polynomials on the FMA units: 0 to 16.
    int exp_poly_of_16;
    // Rescale O only when the running maximum grew by more than this many powers of 2, 0 to 15; 0
    // rescales whenever it grew. Beyond 15, P would leave f16.
    int rescale_threshold;
};

// Parameters of the SM90 forward for wide heads, of which two warpgroups share the columns of O.
struct Sm90WideConfig {
    // Type of Q and O, and of the tiles of K and V.
    Dtype dtype;
    // Tile extent of the head dim of Q and K.
    int head_dim;
    // Tile extent of the head dim of V and O.
    int head_dim_v;
    // The mask that there is code for.
    MaskKind mask;
    // Scores become cap * tanh(s / cap).
    bool softcap;
    // Lengths and starts of sequences are read on the device.
    bool varied;
    // K and V are in pages, found through a page table.
    bool paged;
    // slope * |i + seqlen_k - seqlen_q - j| is subtracted from scores.
    bool alibi;
    // A logit per query head joins the softmax denominator.
    bool sinks;
    // Split keys: several CTAs share the keys of a tile.
    bool split;
    // Query rows per CTA: the 64 of a wgmma.
    int tile_m;
    // Keys per step: 32 or 64.
    int tile_n;
    // V is the first columns of K's tile, of which the tensor K has the others.
    bool latent;
    // Issue S of the next step before P V of this one, under which the softmax then runs.
    bool overlap;
    // K and V buffers in flight, 1 to 4.
    int kv_stages;
    // How tiles are assigned to CTAs: `PerTile` or `Static`.
    Scheduler scheduler;
    // The order of tiles.
    TileOrder tile_order;
    // How many of every 16 exponentials are polynomials on the FMA units: 0 to 16.
    int exp_poly_of_16;
    // Rescale O only when the running maximum grew by more than this many powers of 2, 0 to 15; 0
    // rescales whenever it grew. Beyond 15, P would leave f16.
    int rescale_threshold;
    // Fold the query heads of a K/V head into the rows of a tile, which takes as many queries as fit
    // with all of their heads.
    bool pack_gqa;
    // Equal parts of the query heads of a K/V head, each with tiles of its own: where a group has more
    // heads than a tile has rows.
    int head_parts;
    // Rows of paged keys are copied by the producer's threads, for pages of any size, instead of by TMA
    // with a box for each part of a page.
    bool gather;
    // Type of K and V in device memory: `dtype`, or codes.
    Dtype kv_dtype;
    // CTAs list their work themselves where a call brings no plan and tiles are few
    // (attn/plan_few.cuh).
    bool own_plan;
};

// Parameters of the SM90 forward of e4m3 tensors.
struct Sm90FwdFp8Config {
    // Type of Q and O, and of the tiles of K and V.
    Dtype dtype;
    // Tile extent of the head dim of Q and K.
    int head_dim;
    // Tile extent of the head dim of V and O.
    int head_dim_v;
    // The mask that there is code for.
    MaskKind mask;
    // Scores become cap * tanh(s / cap).
    bool softcap;
    // Lengths and starts of sequences are read on the device.
    bool varied;
    // K and V are in pages, found through a page table.
    bool paged;
    // slope * |i + seqlen_k - seqlen_q - j| is subtracted from scores.
    bool alibi;
    // A logit per query head joins the softmax denominator.
    bool sinks;
    // Split keys: several CTAs share the keys of a tile.
    bool split;
    // Query rows per CTA: `64 * num_wg`.
    int tile_m;
    // Keys per step; a multiple of 32 up to 256.
    int tile_n;
    // Consumer warpgroups, 1 to 3; one more loads, and transposes V.
    int num_wg;
    // Issue S of the next step before P V of this one (overlap within a warpgroup).
    bool overlap_wg;
    // The tensor cores add P V of one step at a time, and f32 units add the steps: sums of many keys on
    // tensor cores lose 6 % of O at 4k keys, 66 % at 128k.
    bool two_level;
    // Q buffers, 1 or 2: with 2, the next tile's Q is loaded while this one's is in use.
    int q_stages;
    // Buffers of K, and of V transposed, 1 to 4.
    int kv_stages;
    // Buffers of V as it is loaded, 1 or 2.
    int v_stages;
    // Warpgroups take turns at the tensor cores: the softmax of one runs under the products of another.
    bool ping_pong;
    // How tiles are assigned to CTAs.
    Scheduler scheduler;
    // The order of tiles.
    TileOrder tile_order;
    // How many of every 16 exponentials are polynomials on the FMA units: 0 to 16.
    int exp_poly_of_16;
    // Fold the query heads of a K/V head into the rows of a tile, which takes as many queries as fit
    // with all of their heads.
    bool pack_gqa;
    // Type of O.
    Dtype out_dtype;
    // Columns of O that one product of P and V has: those for whose sums there are registers.
    int slice;
    // CTAs list their work themselves where a call brings no plan and tiles are few
    // (attn/plan_few.cuh).
    bool own_plan;
};

}  // namespace fa
