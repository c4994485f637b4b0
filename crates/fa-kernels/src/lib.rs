//! The GPU kernels: from a kernel spec to a launch.

mod codegen;
mod compile;
mod config;
mod error;
mod headers;
mod nvrtc;
pub mod params;
mod report;
mod source;
pub mod toolchain;

pub use codegen::{Generated, generated};
pub use compile::{CompileFailure, Compiled, Compiler, CompilerKind};
pub use error::Error;
pub use headers::Headers;
pub use report::{Fault, Report};
pub use source::{ENTRY, Source};

/// Bytes of dynamic shared memory that a spec's kernel is launched with, by the planner's account; `None` for a kernel
/// that the planner has no account of.
pub fn smem_bytes(spec: &fa_core::KernelSpec) -> Option<u32> {
    fa_planner::smem::sm90_fwd_smem(spec).map(|plan| plan.total)
}
