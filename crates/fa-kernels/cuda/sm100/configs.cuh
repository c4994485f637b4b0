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

}  // namespace fa
