//! The guide's sum of tensor buffers, in bytes. Barriers, LSE and dPsum are outside it: see
//! [`crate::account`] for the account that has them.

use crate::head_dims::HeadDims;

use super::candidates::{BwdSpec, FwdSpec};

/// What the guide leaves for tensor buffers: 228 KiB of an SM, less what LSE, dPsum, barriers and the system
/// take.
pub const LIMIT: u32 = 224 * 1024;

/// K and V stages of the forward.
pub const KV_STAGES: u32 = 2;

/// Q stages of the backward.
pub const Q_STAGES: u32 = 2;

/// P and dS stages of the backward.
pub const PDS_STAGES: u32 = 1;

/// Forward: Q (whose buffer O reuses), two stages of K and V, and P unless it stays in registers.
pub fn fwd(dims: HeadDims, spec: &FwdSpec) -> u32 {
    let HeadDims { head_dim: hd, head_dim_v: hdv } = dims;
    let qo = spec.tile_m * hd.max(hdv) * 2;
    let kv = KV_STAGES * spec.tile_n * (hd + hdv) * 2;
    let p = if spec.pv_is_rs { 0 } else { spec.tile_m * spec.tile_n * 2 };
    qo + kv + p
}

/// Backward with `do_stages` of dO: two stages of Q, K, V, P unless it stays in registers, dS, and the f32 dQ
/// tile.
pub const fn bwd(dims: HeadDims, spec: &BwdSpec, do_stages: u32) -> u32 {
    let HeadDims { head_dim: hd, head_dim_v: hdv } = dims;
    let q = Q_STAGES * spec.tile_m * hd * 2;
    let kv = spec.tile_n * (hd + hdv) * 2;
    let d_o = do_stages * spec.tile_m * hdv * 2;
    let ds = PDS_STAGES * spec.tile_m * spec.tile_n * 2;
    let p = if spec.mma_dkv_is_rs() { 0 } else { ds };
    q + kv + d_o + p + ds + spec.tile_m * hd * 4
}

/// dO stages: 2, as Q has, if they fit, else 1. The second number is the sum with that many.
pub const fn bwd_do_stages(dims: HeadDims, spec: &BwdSpec) -> (u32, u32) {
    let both = bwd(dims, spec, 2);
    if both <= LIMIT { (2, both) } else { (1, bwd(dims, spec, 1)) }
}
