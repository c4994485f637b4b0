//! Shared-memory bytes that one step moves: what the tensor cores read, and what is stored for them.

use crate::head_dims::HeadDims;

use super::candidates::{BwdSpec, FwdSpec};
use super::mma::{BwdMmas, FwdMmas};

/// Forward: Q K^T over the head dim, P V over tile_n, and the store of P unless it stays in registers.
pub const fn fwd(dims: HeadDims, spec: &FwdSpec, mmas: &FwdMmas) -> u32 {
    let store_p = if spec.pv_is_rs { 0 } else { spec.tile_m * spec.tile_n * 2 };
    mmas.s.smem_reads(dims.head_dim, false) + mmas.o.smem_reads(spec.tile_n, spec.pv_is_rs) + store_p
}

/// Backward: the five products, the stores of P (unless it stays in registers) and dS, and the f32 dQ tile
/// stored once and read once by the bulk copy that adds it to device memory.
pub const fn bwd(dims: HeadDims, spec: &BwdSpec, mmas: &BwdMmas) -> u32 {
    let rs = spec.mma_dkv_is_rs();
    let products = mmas.sdp.smem_reads(dims.head_dim, false)
        + mmas.sdp.smem_reads(dims.head_dim_v, false)
        + mmas.dv.smem_reads(spec.tile_m, rs)
        + mmas.dk.smem_reads(spec.tile_m, rs)
        + mmas.dq.smem_reads(spec.tile_n, false);
    let store_ds = spec.tile_m * spec.tile_n * 2;
    let store_p = if rs { 0 } else { store_ds };
    products + store_p + store_ds + 2 * spec.tile_m * dims.head_dim * 4
}
