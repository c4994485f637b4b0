//! The forward: from a candidate to its account, or to the limit that it breaks.

use serde::{Deserialize, Serialize};

use crate::head_dims::HeadDims;

use super::candidates::FwdSpec;
use super::mma::FwdMmas;
use super::reject::Reason;
use super::{regs, smem, traffic};

/// A feasible forward configuration with its account. Registers are per thread of an MMA warpgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FwdConfig {
    /// Query rows of a CTA.
    pub tile_m: u32,
    /// Keys per step.
    pub tile_n: u32,
    /// MMA warpgroups.
    pub num_wg: u32,
    /// P as a register operand of P V.
    pub pv_is_rs: bool,
    /// S of the next step is issued before P V of this one.
    pub overlap_wg: bool,
    /// Accumulators of S.
    pub regs_s: u32,
    /// Accumulators of O.
    pub regs_o: u32,
    /// P in 16 bits, counted in `total_regs` with overlap only.
    pub regs_p: u32,
    /// Registers live at the peak.
    pub total_regs: u32,
    /// The budget they fit.
    pub reg_limit: u32,
    /// Bytes of the tensor buffers.
    pub smem_bytes: u32,
    /// Bytes of shared memory moved per step.
    pub smem_traffic: u32,
}

impl FwdConfig {
    /// The candidate that this is the account of.
    pub const fn spec(&self) -> FwdSpec {
        let FwdConfig { tile_m, tile_n, num_wg, pv_is_rs, overlap_wg, .. } = *self;
        FwdSpec { tile_m, tile_n, num_wg, pv_is_rs, overlap_wg }
    }

    /// Shared-memory bytes moved per element of S.
    pub fn traffic_per_element(&self) -> f64 {
        f64::from(self.smem_traffic) / f64::from(self.tile_m * self.tile_n)
    }
}

/// Checks a candidate for head dims in multiples of 32 against shapes, registers and shared memory, in that
/// order.
///
/// # Errors
/// The first limit that it breaks.
pub fn check(dims: HeadDims, spec: &FwdSpec) -> Result<FwdConfig, Reason> {
    let mmas = FwdMmas::new(dims, spec);
    mmas.s.check()?;
    mmas.o.check()?;
    let (regs_s, regs_o) = (mmas.s.regs(), mmas.o.regs());
    let regs_p = regs_s / 2;
    let total_regs = regs::fwd(regs_s, regs_p, regs_o, spec.overlap_wg);
    let reg_limit = regs::limit(spec.num_wg);
    if total_regs > reg_limit {
        return Err(Reason::RegOverflow { need: total_regs, have: reg_limit });
    }
    let smem_bytes = smem::fwd(dims, spec);
    if smem_bytes > smem::LIMIT {
        return Err(Reason::SmemOverflow { need: smem_bytes, have: smem::LIMIT });
    }
    let FwdSpec { tile_m, tile_n, num_wg, pv_is_rs, overlap_wg } = *spec;
    Ok(FwdConfig {
        tile_m,
        tile_n,
        num_wg,
        pv_is_rs,
        overlap_wg,
        regs_s,
        regs_o,
        regs_p,
        total_regs,
        reg_limit,
        smem_bytes,
        smem_traffic: traffic::fwd(dims, spec, &mmas),
    })
}
