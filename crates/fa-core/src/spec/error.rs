//! Why specs are invalid, and why a kernel does not compute a problem.

use crate::{Arch, Dtype};

/// Why a [`super::KernelSpec`] is invalid.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// A number is outside its range or not a multiple of what it must be.
    #[error("{field} = {value}: must be {need}")]
    BadValue {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u32,
        /// What it must be.
        need: String,
    },
    /// The kernel does not compute in this type.
    #[error("dtype {dtype} is not supported by {kernel}: use f16 or bf16")]
    Dtype {
        /// The type.
        dtype: Dtype,
        /// The kernel.
        kernel: &'static str,
    },
    /// Two options exclude each other.
    #[error("{0}")]
    Conflict(String),
    /// The kernel does not run on this architecture.
    #[error("{kernel} does not run on {arch}: it needs {need}")]
    Arch {
        /// The kernel.
        kernel: &'static str,
        /// The architecture.
        arch: Arch,
        /// What its family needs.
        need: &'static str,
    },
    /// The text is not RON, or has unknown or missing fields.
    #[error("not a kernel spec: {0}")]
    Ron(String),
}

/// Why a kernel does not compute a problem: the first thing in which they differ.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: the kernel computes {kernel}, not {problem}")]
pub struct Mismatch {
    /// What differs, mostly a field.
    pub what: &'static str,
    /// What the kernel computes.
    pub kernel: String,
    /// What the problem asks for.
    pub problem: String,
}
