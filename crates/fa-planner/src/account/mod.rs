//! What a kernel takes of an SM: shared memory and registers, counted exactly, and the limit that it breaks.
//!
//! This is the part of the planner that launching needs: the layout of shared memory, the panels of the
//! operands, and the numbers of CTAs that share a K/V head (backward) or the keys of a tile (forward). It
//! knows no problem but for those numbers, and ranks nothing.

pub(crate) mod code;
pub(crate) mod kv_splits;
pub(crate) mod pages;
pub mod panels;
pub(crate) mod reason;
pub(crate) mod splits;
pub(crate) mod stored;
mod turns;

use fa_core::{Arch, Kernel, KernelSpec};
use serde::Serialize;

use crate::kernels::{sm80_bwd, sm80_fwd, sm90_bwd, sm90_fwd, spilled::spilled};
use crate::occupancy::register_ceiling;

pub use crate::occupancy::Occupancy;
pub use crate::registers::{Registers, SetMaxNReg};
pub use crate::smem::SmemPlan;
pub use code::missing_code;
pub use kv_splits::{MAX_SPLITS, kv_splits};
pub use pages::{boxes_need, page_part};
pub use panels::BwdPanels;
pub use reason::Reason;
pub use splits::head_splits;
pub use stored::{head_bytes, storing_heads};
pub use turns::heads_side_by_side;

/// What a CTA of a kernel takes of an SM.
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
    /// CTAs per SM that the kernel is planned for: what its launch bounds ask.
    pub blocks_per_sm: u32,
}

/// Accounts for `spec` on `arch`, or says which limit it breaks first: its rules, registers, shared memory,
/// occupancy.
///
/// # Errors
/// The [`Reason`].
pub fn account(spec: &KernelSpec, arch: Arch) -> Result<Account, Reason> {
    spec.check().map_err(|e| Reason::Rule(e.to_string()))?;
    spec.check_arch(arch).map_err(|e| Reason::Rule(e.to_string()))?;
    let limits = arch.limits();
    let threads = spec.threads();
    let (regs, launch_regs, blocks_per_sm) = match &spec.kernel {
        Kernel::Sm80Fwd(kernel) => {
            let regs = sm80_fwd::account::registers(spec, kernel, limits);
            (regs, regs.total, kernel.blocks_per_sm)
        }
        // The launch gives every thread an even share and setmaxnreg redistributes it: a CTA takes all
        // registers of the SM.
        Kernel::Sm90Fwd(kernel) => {
            (sm90_fwd::account::registers(spec, kernel), register_ceiling(limits, threads, 1), 1)
        }
        Kernel::Sm80Bwd(kernel) => {
            let regs = sm80_bwd::account::registers(spec, kernel, arch);
            (regs, regs.total, kernel.blocks_per_sm)
        }
        Kernel::Sm90Bwd(kernel) => {
            (sm90_bwd::account::registers(spec, kernel), register_ceiling(limits, threads, 1), 1)
        }
    };
    if regs.total > regs.limit {
        return Err(Reason::Registers { need: regs.total, have: regs.limit });
    }
    let spills = match &spec.kernel {
        Kernel::Sm90Fwd(kernel) => sm90_fwd::spills::known(spec, kernel),
        Kernel::Sm90Bwd(kernel) => sm90_bwd::spills::known(spec, kernel),
        Kernel::Sm80Bwd(kernel) => sm80_bwd::spills::known(spec, kernel, arch),
        Kernel::Sm80Fwd(kernel) => sm80_fwd::spills::known(spec, kernel),
    };
    if spills || spilled(spec, arch) {
        return Err(Reason::Spills { need: regs.total, have: regs.limit });
    }
    let smem = smem(spec);
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
    match &spec.kernel {
        Kernel::Sm80Fwd(kernel) => sm80_fwd::account::smem(spec, kernel),
        Kernel::Sm90Fwd(kernel) => sm90_fwd::account::smem(spec, kernel),
        Kernel::Sm80Bwd(kernel) => sm80_bwd::account::smem(spec, kernel),
        Kernel::Sm90Bwd(kernel) => sm90_bwd::account::smem(spec, kernel),
    }
}
