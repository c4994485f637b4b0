//! What a kernel takes of an SM, by the exact account, and why it does not fit.

pub mod panels;

use fa_core::{Arch, Kernel, KernelSpec, Mismatch};
use serde::Serialize;

use crate::kernels::{sm80_bwd, sm80_fwd, sm90_bwd, sm90_fwd};
use crate::occupancy::{Limiter, Occupancy, register_ceiling};
use crate::smem::{SmemPlan, sm90_fwd_smem};

/// Registers per thread of the threads that compute, as predicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Registers {
    /// Score accumulators.
    pub s: u32,
    /// P as operand fragments, where they live beside the scores.
    pub p: u32,
    /// Output accumulators.
    pub o: u32,
    /// Q fragments, where they are kept.
    pub q: u32,
    /// Addresses, row statistics, other fragments: an allowance.
    pub other: u32,
    /// Sum of the above.
    pub total: u32,
    /// What a thread may have.
    pub limit: u32,
    /// How setmaxnreg shares the registers out, on kernels with roles.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub setmaxnreg: Option<SetMaxNReg>,
}

/// Registers per thread by role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SetMaxNReg {
    /// Of the warp groups that issue matrix products.
    pub mma: u32,
    /// Of the warp group that loads.
    pub producer: u32,
}

/// What a block of a kernel takes of an SM.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Account {
    /// Shared memory, buffer by buffer.
    pub smem: SmemPlan,
    /// Registers of a computing thread.
    pub regs: Registers,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks per SM by each resource.
    pub occupancy: Occupancy,
    /// Blocks per SM that the kernel is planned for: what its launch bounds ask.
    pub blocks_per_sm: u32,
}

/// Why a spec is no plan.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// It breaks a rule of its kernel.
    #[error("{0}")]
    Rule(String),
    /// It does not compute the problem.
    #[error("the kernel has {field} {have}, the problem needs {need}")]
    Problem {
        /// What does not fit.
        field: &'static str,
        /// The kernel's value.
        have: String,
        /// The problem's value.
        need: String,
    },
    /// Shared memory of one block.
    #[error("shared memory: needs {need} B of {have} B ({} B too many)", need - have)]
    Smem {
        /// Bytes needed.
        need: u32,
        /// Bytes that a block may use.
        have: u32,
    },
    /// Registers of one thread.
    #[error("registers: needs {need} of {have} per thread ({} too many)", need - have)]
    Registers {
        /// Registers needed.
        need: u32,
        /// Registers that a thread may use.
        have: u32,
    },
    /// Registers of one thread again: they would fit, and the compiler spills all the same.
    #[error("registers: {need} of {have} per thread, but the compiler is known to spill")]
    Spills {
        /// Registers counted.
        need: u32,
        /// Registers that a thread may use.
        have: u32,
    },
    /// Tensor memory of one block.
    #[error("tensor memory: needs {need} of {have} columns ({} too many)", need - have)]
    Tmem {
        /// Columns needed.
        need: u32,
        /// Columns that a block may use.
        have: u32,
    },
    /// Fewer blocks than asked for are resident.
    #[error("occupancy: asks for {need} blocks per SM, {limiter:?} allow {have}")]
    Occupancy {
        /// Blocks asked for.
        need: u32,
        /// Blocks that fit.
        have: u32,
        /// The resource that is short.
        limiter: Limiter,
    },
}

impl Reason {
    /// A short name for tables and counts.
    pub const fn kind(&self) -> &'static str {
        match self {
            Reason::Rule(_) => "rule",
            Reason::Problem { .. } => "problem",
            Reason::Smem { .. } => "smem",
            Reason::Registers { .. } => "registers",
            Reason::Spills { .. } => "spills",
            Reason::Tmem { .. } => "tmem",
            Reason::Occupancy { .. } => "occupancy",
        }
    }

    /// What was needed and what there was, for limits that are numbers.
    pub const fn need_have(&self) -> Option<(u32, u32)> {
        match self {
            Reason::Smem { need, have }
            | Reason::Registers { need, have }
            | Reason::Tmem { need, have }
            | Reason::Occupancy { need, have, .. } => Some((*need, *have)),
            Reason::Rule(_) | Reason::Problem { .. } | Reason::Spills { .. } => None,
        }
    }

    /// By what share the limit is missed; infinite for rules.
    pub fn excess(&self) -> f64 {
        self.need_have().map_or(f64::INFINITY, |(need, have)| f64::from(need) / f64::from(have.max(1)) - 1.0)
    }
}

impl From<Mismatch> for Reason {
    fn from(Mismatch { what, kernel, problem }: Mismatch) -> Reason {
        Reason::Problem { field: what, have: kernel, need: problem }
    }
}

/// Accounts for `spec` on `arch`, or says which limit it breaks first: its rules, registers, shared memory, occupancy.
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
            let regs = sm80_fwd::candidates::registers(spec, kernel, limits);
            (regs, regs.total, kernel.blocks_per_sm)
        }
        // A block is launched with an even share and re-divides it: all registers of the SM, so one block.
        Kernel::Sm90Fwd(kernel) => {
            (sm90_fwd::candidates::registers(spec, kernel), register_ceiling(limits, threads, 1), 1)
        }
        Kernel::Sm80Bwd(kernel) => {
            let regs = sm80_bwd::candidates::registers(spec, kernel, arch);
            (regs, regs.total, kernel.blocks_per_sm)
        }
        Kernel::Sm90Bwd(kernel) => {
            (sm90_bwd::candidates::registers(spec, kernel), register_ceiling(limits, threads, 1), 1)
        }
    };
    if regs.total > regs.limit {
        return Err(Reason::Registers { need: regs.total, have: regs.limit });
    }
    let refused = match &spec.kernel {
        Kernel::Sm90Fwd(kernel) => sm90_fwd::spills::is_refused(spec, kernel),
        Kernel::Sm90Bwd(kernel) => sm90_bwd::candidates::is_refused(spec, kernel),
        Kernel::Sm80Bwd(kernel) => sm80_bwd::candidates::is_refused(spec, kernel, arch),
        Kernel::Sm80Fwd(_) => false,
    };
    if refused {
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
        Kernel::Sm80Fwd(kernel) => sm80_fwd::candidates::smem(spec, kernel),
        Kernel::Sm90Fwd(_) => sm90_fwd_smem(spec).unwrap_or_default(),
        Kernel::Sm80Bwd(kernel) => sm80_bwd::candidates::smem(spec, kernel),
        Kernel::Sm90Bwd(kernel) => sm90_bwd::account::bwd(spec.head_dim, spec.head_dim_v, kernel),
    }
}
