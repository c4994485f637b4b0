// Written by `cargo xtask codegen` from the Rust types; do not edit.
// The compile-time parameters of sm100 kernels.
#pragma once
#include "config.cuh"

namespace fa {

// Parameters of the SM100 forward, which was assembled and emulated, and never run on a GPU.
struct Sm100FwdConfig {
    // Type of Q, K, V and O.
    Dtype dtype;
    // Tile extent of the head dim of Q and K.
    int head_dim;
    // Tile extent of the head dim of V and O.
    int head_dim_v;
    // Masking code.
    MaskKind mask;
    // Scores pass through cap * tanh(s / cap).
    bool softcap;
    // Lengths and starts of sequences are read on the device.
    bool varied;
    // K and V lie in pages, found through a table.
    bool paged;
    // slope * |i + seqlen_k - seqlen_q - j| is subtracted from scores.
    bool alibi;
    // A logit per query head joins the denominator.
    bool sinks;
    // Several CTAs share the keys of a tile's rows.
    bool split;
    // Query rows of a CTA: `128 * q_tiles`.
    int tile_m;
    // Keys of a step; a multiple of 32 up to 128.
    int tile_n;
    // Tiles of 128 queries that share K and V, 1 or 2: with 2, the softmax of one runs under the
    // products of the other.
    int q_tiles;
    // Slots for tiles of K and V, which take turns in one ring, 2 to 12.
    int kv_stages;
    // How tiles are given to CTAs: `PerTile` or `Static`.
    Scheduler scheduler;
    // The order of tiles.
    TileOrder tile_order;
    // Of 16 exponentials, how many are polynomials on the FMA units: 0 to 16.
    int exp_poly_of_16;
    // Rescale O only when the running maximum grew by more than this many powers of 2, 0 to 15; 0
    // rescales whenever it grew. Beyond 15, P would leave f16.
    int rescale_threshold;
};

}  // namespace fa
