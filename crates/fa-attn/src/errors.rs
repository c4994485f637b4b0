//! The errors inside [`Error`](crate::Error), for programs that tell them apart.

pub use fa_core::{AppendError, MergeError, ProblemError, SpecError, Unserved};
pub use fa_cpu::CpuError;
pub use fa_kernels::Error as KernelError;
pub use fa_kernels::Fault;
pub use fa_kernels::atomic_file::WriteError;
pub use fa_planner::plan::PlanError;
