//! Why a kernel is rejected: the limit that it breaks, with the numbers.

use fa_core::{Mismatch, Unserved};
use serde::Serialize;

use crate::occupancy::Limiter;

/// Why a kernel is rejected.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// It breaks a rule of its kernel.
    #[error("{0}")]
    Rule(String),
    /// It does not compute the problem.
    #[error("{field}: the kernel computes {have}; the problem has {need}")]
    Problem {
        /// What does not fit.
        field: &'static str,
        /// The kernel's value.
        have: String,
        /// The problem's value.
        need: String,
    },
    /// The problem exceeds what a launch of it can hold.
    #[error("{0}")]
    Launch(Unserved),
    /// Its device code lacks an option.
    #[error("{kernel} has no device code for {what}")]
    Code {
        /// The kernel.
        kernel: &'static str,
        /// What it lacks.
        what: &'static str,
    },
    /// Shared memory of one CTA.
    #[error("shared memory: needs {need} B of {have} B ({} B too many)", need - have)]
    Smem {
        /// Bytes needed.
        need: u32,
        /// Bytes that a CTA may use.
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
    /// Registers of one thread: the account has room, but a compiler is known to spill.
    #[error("registers: {need} of {have} per thread, but it spills in {compiler}")]
    Spills {
        /// Registers counted.
        need: u32,
        /// Registers that a thread may use.
        have: u32,
        /// The compiler, with its version.
        compiler: &'static str,
    },
    /// Tensor memory of one CTA.
    #[error("tensor memory: needs {need} of {have} columns ({} too many)", need - have)]
    Tmem {
        /// Columns needed.
        need: u32,
        /// Columns that a CTA may use.
        have: u32,
    },
    /// Fewer CTAs than asked for are resident.
    #[error("occupancy: asks for {need} blocks per SM, {have} fit by {limiter}")]
    Occupancy {
        /// CTAs asked for.
        need: u32,
        /// CTAs that fit.
        have: u32,
        /// The resource that is short.
        limiter: Limiter,
    },
}

impl Reason {
    /// The limit's short name, for tables and counts.
    pub const fn kind(&self) -> &'static str {
        match self {
            Reason::Rule(_) => "rule",
            Reason::Problem { .. } => "problem",
            Reason::Launch(unserved) => unserved.what(),
            Reason::Code { .. } => "code",
            Reason::Smem { .. } => "smem",
            Reason::Registers { .. } => "registers",
            Reason::Spills { .. } => "spills",
            Reason::Tmem { .. } => "tmem",
            Reason::Occupancy { .. } => "occupancy",
        }
    }

    /// What is needed and what there is, for limits that are numbers.
    pub const fn need_have(&self) -> Option<(u32, u32)> {
        match self {
            Reason::Smem { need, have }
            | Reason::Registers { need, have }
            | Reason::Tmem { need, have }
            | Reason::Occupancy { need, have, .. } => Some((*need, *have)),
            Reason::Rule(_)
            | Reason::Problem { .. }
            | Reason::Launch(_)
            | Reason::Code { .. }
            | Reason::Spills { .. } => None,
        }
    }

    /// The excess over the limit as a share of it; infinite for limits that are not numbers.
    pub fn excess(&self) -> f64 {
        self.need_have().map_or(f64::INFINITY, |(need, have)| f64::from(need) / f64::from(have.max(1)) - 1.0)
    }
}

impl From<Unserved> for Reason {
    fn from(unserved: Unserved) -> Reason {
        match unserved {
            Unserved::Differs(Mismatch { what, kernel, problem }) => {
                Reason::Problem { field: what, have: kernel, need: problem }
            }
            other @ (Unserved::Page { .. }
            | Unserved::TooLong { .. }
            | Unserved::Codes { .. }
            | Unserved::Scale { .. }
            | Unserved::Softcap { .. }) => Reason::Launch(other),
        }
    }
}
