//! Enumerates, checks and ranks kernel configurations.
//!
//! - `plan`: from a problem to ranked kernels, with their accounts of registers and shared memory, and reasons for the others;
//! - `cost`: predicted time, with its bottleneck; `banks`: conflicts in shared memory; `occupancy`: blocks per SM;
//! - `sm90`: the block size tuning guide's model; `sm80`, `sm100`: candidates and account of those families.
//!
//! No I/O and no CUDA: a plan is made of a [`fa_core::Problem`] and the limits of a [`fa_core::Arch`].

pub mod banks;
pub mod cost;
pub mod head_dims;
pub mod mode;
pub mod occupancy;
pub mod plan;
pub mod sm100;
pub mod sm80;
pub mod sm90;
pub mod smem;

pub use head_dims::{HeadDims, HeadDimsError};
pub use mode::{Mode, ParseModeError};
