//! The backward: from a candidate to its account, or to the limit that it breaks.

use serde::{Deserialize, Serialize};

use crate::head_dims::HeadDims;

use super::candidates::BwdSpec;
use super::mma::BwdMmas;
use super::reject::Reason;
use super::{regs, smem, traffic};

/// A feasible backward configuration with its account. Registers are per thread of an MMA warpgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BwdConfig {
    /// Queries per step.
    pub tile_m: u32,
    /// Key rows of a CTA.
    pub tile_n: u32,
    /// MMA warpgroups.
    pub num_wg: u32,
    /// Buffers of Q.
    pub q_stage: u32,
    /// Buffers of dO.
    pub do_stage: u32,
    /// Buffers of P and dS.
    pub pds_stage: u32,
    /// Compute S and dP transposed.
    pub sdp_swap_ab: bool,
    /// Compute dK and dV transposed.
    pub dkv_swap_ab: bool,
    /// Compute dQ transposed.
    pub dq_swap_ab: bool,
    /// Warpgroups along tile_m in S and dP.
    pub atom_layout_m_sdp: u32,
    /// Warpgroups along tile_n in dK and dV.
    pub atom_layout_n_dkv: u32,
    /// Warpgroups along tile_m in dQ.
    pub atom_layout_m_dq: u32,
    /// P and dS as register operands of dV and dK.
    pub mma_dkv_is_rs: bool,
    /// Accumulators of S, and as many of dP.
    pub regs_sdp: u32,
    /// Accumulators of dK.
    pub regs_dk: u32,
    /// Accumulators of dV.
    pub regs_dv: u32,
    /// Accumulators of dQ.
    pub regs_dq: u32,
    /// Registers live at the peak.
    pub total_regs: u32,
    /// The budget they fit.
    pub reg_limit: u32,
    /// Bytes of the tensor buffers.
    pub smem_bytes: u32,
    /// Bytes of shared memory moved per step.
    pub smem_traffic: u32,
}

impl BwdConfig {
    /// The candidate that this is the account of.
    pub const fn spec(&self) -> BwdSpec {
        BwdSpec {
            tile_m: self.tile_m,
            tile_n: self.tile_n,
            num_wg: self.num_wg,
            sdp_swap_ab: self.sdp_swap_ab,
            dkv_swap_ab: self.dkv_swap_ab,
            dq_swap_ab: self.dq_swap_ab,
            atom_layout_m_sdp: self.atom_layout_m_sdp,
            atom_layout_n_dkv: self.atom_layout_n_dkv,
            atom_layout_m_dq: self.atom_layout_m_dq,
        }
    }

    /// Shared-memory bytes moved per element of S.
    pub fn traffic_per_element(&self) -> f64 {
        f64::from(self.smem_traffic) / f64::from(self.tile_m * self.tile_n)
    }
}

/// Checks a candidate for the head dims of a tile against shapes, registers and shared memory, in that
/// order.
///
/// # Errors
/// The first limit that it breaks.
pub fn check(dims: HeadDims, spec: &BwdSpec) -> Result<BwdConfig, Reason> {
    let mmas = BwdMmas::new(dims, spec);
    for mma in [&mmas.sdp, &mmas.dk, &mmas.dv, &mmas.dq] {
        mma.check()?;
    }
    let [regs_sdp, regs_dk, regs_dv, regs_dq] =
        [mmas.sdp.regs(), mmas.dk.regs(), mmas.dv.regs(), mmas.dq.regs()];
    let total_regs = regs::bwd(regs_sdp, regs_dk, regs_dv, regs_dq);
    let reg_limit = regs::limit(spec.num_wg);
    if total_regs > reg_limit {
        return Err(Reason::RegOverflow { need: total_regs, have: reg_limit });
    }
    let (do_stage, smem_bytes) = smem::bwd_do_stages(dims, spec);
    if smem_bytes > smem::LIMIT {
        return Err(Reason::SmemOverflow { need: smem_bytes, have: smem::LIMIT });
    }
    Ok(BwdConfig {
        tile_m: spec.tile_m,
        tile_n: spec.tile_n,
        num_wg: spec.num_wg,
        q_stage: smem::Q_STAGES,
        do_stage,
        pds_stage: smem::PDS_STAGES,
        sdp_swap_ab: spec.sdp_swap_ab,
        dkv_swap_ab: spec.dkv_swap_ab,
        dq_swap_ab: spec.dq_swap_ab,
        atom_layout_m_sdp: spec.atom_layout_m_sdp,
        atom_layout_n_dkv: spec.atom_layout_n_dkv,
        atom_layout_m_dq: spec.atom_layout_m_dq,
        mma_dkv_is_rs: spec.mma_dkv_is_rs(),
        regs_sdp,
        regs_dk,
        regs_dv,
        regs_dq,
        total_regs,
        reg_limit,
        smem_bytes,
        smem_traffic: traffic::bwd(dims, spec, &mmas),
    })
}
