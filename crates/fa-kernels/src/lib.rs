//! The GPU kernels: from a kernel spec to a launch.

mod args;
pub mod bundle;
pub mod cache;
mod codegen;
mod compile;
mod config;
pub mod driver;
mod error;
mod forward;
mod headers;
mod kernels;
mod module;
mod nvrtc;
pub mod params;
mod report;
pub mod ship;
mod source;
pub mod specs;
mod tma;
pub mod toolchain;

pub use args::{Element, ForwardArgs, Input, Output, RawForwardArgs, RawTensor};
pub use cache::Cache;
pub use codegen::{Generated, generated};
pub use compile::{CompileFailure, Compiled, Compiler, CompilerKind};
pub use cudarc;
pub use error::Error;
pub use forward::Forward;
pub use headers::Headers;
pub use kernels::Kernels;
pub use module::LoadedKernel;
pub use report::{Fault, Report};
pub use source::{ENTRY, Source};

/// Bytes of dynamic shared memory that a spec's kernel is launched with, by the planner's account.
pub fn smem_bytes(spec: &fa_core::KernelSpec) -> u32 {
    fa_planner::plan::account::smem(spec).total
}
