//! The resources of an SM that a kernel takes, shared memory and registers, and the limit that it breaks.
//!
//! This is the part of the planner that launching needs: the layout of shared memory, the panels of the
//! operands, and limits on the division of a tile's work. Nothing is ranked, and no time is predicted.

pub(crate) mod clusters;
pub(crate) mod code;
pub(crate) mod combine;
pub(crate) mod pages;
pub mod panels;
pub(crate) mod reason;
pub(crate) mod stored;
pub(crate) mod tiles;
mod turns;

use fa_core::{Arch, KernelSpec};
use serde::Serialize;

use crate::kernels::planned::{self, Time};
use crate::occupancy::register_ceiling;
use crate::refusals::{COMPILER, Refusals};

pub use crate::occupancy::Occupancy;
pub use crate::registers::{Registers, SetMaxNReg};
pub use crate::smem::SmemPlan;
pub use clusters::{LARGEST_CLUSTER, combines_in_clusters};
pub use combine::{MAX_SPLITS, combine_ctas};
pub use pages::{boxes_need, page_part};
pub use panels::BwdPanels;
pub use reason::Reason;
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
    // With setmaxnreg the launch gives every thread an even share, to be redistributed: the CTAs of an SM
    // take all of its registers.
    let launch_regs = match regs.setmaxnreg {
        Some(_) => register_ceiling(limits, threads, blocks_per_sm),
        None => regs.total,
    };
    if regs.total > regs.limit {
        return Err(Reason::Registers { need: regs.total, have: regs.limit });
    }
    if Refusals::shipped().has(spec, arch) {
        return Err(Reason::Spills { need: regs.total, have: regs.limit, compiler: COMPILER });
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
