//! The resources of an SM that a kernel takes, shared memory and registers, and the limit that it breaks.
//!
//! This is the part of the planner that launching needs: the layout of shared memory, the panels of the
//! operands, and the numbers of CTAs that share a K/V head (backward) or the keys of a tile (forward). Only
//! those numbers depend on a problem; nothing is ranked.

pub(crate) mod clusters;
pub(crate) mod code;
pub(crate) mod kv_splits;
pub(crate) mod pages;
pub mod panels;
pub(crate) mod reason;
pub(crate) mod splits;
pub(crate) mod stored;
pub(crate) mod tiles;
mod turns;

use fa_core::{Arch, KernelSpec, Problem};
use serde::Serialize;

use crate::cost::constants::CostConstants;
use crate::kernels::planned::{self, Time};
use crate::kernels::spilled::is_known_to_spill;
use crate::occupancy::register_ceiling;

pub use crate::occupancy::Occupancy;
pub use crate::registers::{Registers, SetMaxNReg};
pub use crate::smem::SmemPlan;
pub use clusters::split_cluster;
pub use kv_splits::{MAX_SPLITS, kv_splits};
pub use pages::{boxes_need, page_part};
pub use panels::BwdPanels;
pub use reason::Reason;
use splits::Split;

pub use stored::{head_bytes, storing_heads};
pub use turns::heads_side_by_side;

/// The resources of an SM that a CTA of a kernel takes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Account {
    /// Shared memory, buffer by buffer.
    pub smem: SmemPlan,
    /// Registers of a computing thread.
    pub regs: Registers,
    /// Threads of a CTA.
    pub threads: u32,
    /// CTAs per SM by each resource.
    pub occupancy: Occupancy,
    /// CTAs per SM that the kernel is planned for: those of its launch bounds.
    pub blocks_per_sm: u32,
}

/// Accounts for `spec` on `arch`.
///
/// # Errors
/// The [`Reason`] for the first limit that it breaks, in the order: its rules, registers, known spills,
/// shared memory, occupancy.
pub fn account(spec: &KernelSpec, arch: Arch) -> Result<Account, Reason> {
    spec.check().map_err(|e| Reason::Rule(e.to_string()))?;
    spec.check_arch(arch).map_err(|e| Reason::Rule(e.to_string()))?;
    let limits = arch.limits();
    let threads = spec.threads();
    let blocks_per_sm = spec.traits().blocks_per_sm;
    let kernel = planned::of(&spec.kernel);
    let regs = kernel.registers(spec, arch);
    // With setmaxnreg the launch gives every thread an even share, to be redistributed: a CTA takes all
    // registers of the SM.
    let launch_regs = match regs.setmaxnreg {
        Some(_) => register_ceiling(limits, threads, 1),
        None => regs.total,
    };
    if regs.total > regs.limit {
        return Err(Reason::Registers { need: regs.total, have: regs.limit });
    }
    if is_known_to_spill(spec, arch) {
        return Err(Reason::Spills { need: regs.total, have: regs.limit });
    }
    let smem = kernel.smem(spec);
    if smem.total > limits.smem_per_block {
        return Err(Reason::Smem { need: smem.total, have: limits.smem_per_block });
    }
    let occupancy = Occupancy::of(limits, smem.total, launch_regs, threads);
    let (limiter, have) = occupancy.tightest();
    if have < blocks_per_sm {
        return Err(Reason::Occupancy { need: blocks_per_sm, have, limiter });
    }
    Ok(Account { smem, regs, threads, occupancy, blocks_per_sm })
}

/// The shared memory of any kernel, buffer by buffer: `total` is its `sizeof(SharedStorage)`.
pub fn smem(spec: &KernelSpec) -> SmemPlan {
    planned::of(&spec.kernel).smem(spec)
}

/// The first thing that `spec` asks for and its kernel has no device code for; `None` where it has all.
pub fn missing_code(spec: &KernelSpec) -> Option<&'static str> {
    planned::of(&spec.kernel).code().missing(spec)
}

/// The panels of a backward's tiles; `None` for a forward, and where threads copy rows instead of TMA.
pub fn panels_of(spec: &KernelSpec) -> Option<BwdPanels> {
    match planned::of(&spec.kernel).time() {
        Time::Backward(kernel) => kernel.panels(spec),
        Time::Forward(_) => None,
    }
}

/// Parts into which the query heads of a K/V head are divided, each with a CTA per tile of keys: 1 to the
/// group's size; 1 for a forward.
///
/// Without parts the CTAs of a K/V head's tiles step through all its query heads. Under a mask they see
/// different numbers of queries and drift apart, each in another head's Q, dO and dQ, until the L2 no longer
/// holds what is in use (NB-052). Parts keep them together and fill the GPU, but dK and dV are then summed up
/// in f32 in device memory. The number with the least estimated time is taken; the constants reproduce the
/// measured choice (`tests/splits.rs`), not the rates.
///
/// 1 where there is nothing to sum. In a deterministic backward the parts add in turn. `sms` is the number of
/// SMs of the GPU at hand.
pub fn head_splits(problem: &Problem, spec: &KernelSpec, arch: Arch, sms: u32) -> usize {
    match planned::of(&spec.kernel).time() {
        Time::Backward(kernel) => {
            let rates = kernel.rates(arch.limits(), &CostConstants::of(arch));
            Split::choose(problem, spec, rates, arch, sms).parts
        }
        Time::Forward(_) => 1,
    }
}
