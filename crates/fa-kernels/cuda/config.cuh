// Written by `cargo xtask codegen` from the Rust types; do not edit.
// A kernel's compile-time parameters: the template argument of its kernel.
#pragma once

namespace fa {

enum class Dtype { F32, F16, Bf16, E4m3 };

enum class MaskKind { Full, Causal, Window };

enum class Scheduler { PerTile, Static, Dynamic };

enum class TileOrder { Natural, LongestFirst };

struct Sm80FwdConfig {
    Dtype dtype;
    int head_dim;
    int head_dim_v;
    MaskKind mask;
    bool softcap;
    int tile_m;
    int tile_n;
    int num_warps;
    int stages;
    bool q_in_regs;
    int blocks_per_sm;
    bool swizzle;
    bool ldmatrix;
    bool exp2;
    bool fast_math;
    bool loop_split;
    bool reverse_blocks;
};

struct Sm90FwdConfig {
    Dtype dtype;
    int head_dim;
    int head_dim_v;
    MaskKind mask;
    bool softcap;
    int tile_m;
    int tile_n;
    int num_wg;
    bool pv_is_rs;
    bool overlap_wg;
    int q_stages;
    int kv_stages;
    bool ping_pong;
    Scheduler scheduler;
    TileOrder tile_order;
    int cluster_m;
    int exp_poly_of_16;
    int rescale_threshold;
    bool pack_gqa;
};

struct Sm80BwdConfig {
    Dtype dtype;
    int head_dim;
    int head_dim_v;
    MaskKind mask;
    bool softcap;
    int tile_m;
    int tile_n;
    int num_warps;
    int q_stages;
    int do_stages;
    int atom_layout_m_sdp;
    int atom_layout_n_dkv;
    int atom_layout_m_dq;
    int dq_first;
    int blocks_per_sm;
    TileOrder tile_order;
    bool deterministic;
};

struct Sm90BwdConfig {
    Dtype dtype;
    int head_dim;
    int head_dim_v;
    MaskKind mask;
    bool softcap;
    int tile_m;
    int tile_n;
    int num_wg;
    int q_stages;
    int do_stages;
    int pds_stages;
    bool sdp_swap_ab;
    bool dkv_swap_ab;
    bool dq_swap_ab;
    int atom_layout_m_sdp;
    int atom_layout_n_dkv;
    int atom_layout_m_dq;
    bool mma_dkv_is_rs;
    bool dq_via_smem;
    int dq_slices;
    TileOrder tile_order;
    bool deterministic;
};

}  // namespace fa
