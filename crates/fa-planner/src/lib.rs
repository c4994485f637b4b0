//! Enumerates, checks and ranks kernel configurations.
//!
//! - [`plan`](mod@plan): from a problem to ranked kernels, with their accounts of registers and shared
//!   memory, and reasons for the others; [`why`] asks about single candidates;
//! - [`kernels`]: for each kernel its candidates, account, known spills and cost;
//! - [`account`]: what launching a kernel needs to know of it, the part that `fa-kernels` uses;
//! - [`cost`]: predicted time, with its bottleneck; [`banks`]: conflicts in shared memory; [`occupancy`]:
//!   CTAs per SM;
//! - [`guide`]: the model of the SM90 block size tuning guide, and its search.
//!
//! No I/O and no CUDA: a plan is made of a [`fa_core::Problem`] and the limits of a [`fa_core::Arch`].

pub mod account;
pub mod banks;
pub mod cost;
pub mod guide;
pub mod head_dims;
pub mod kernels;
pub mod occupancy;
pub mod plan;
pub mod registers;
pub mod smem;
mod table;
pub mod tally;
pub mod why;

pub use guide::mode::{Mode, ParseModeError};
pub use head_dims::{HeadDims, HeadDimsError};
