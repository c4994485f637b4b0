//! Enumerates, checks and ranks kernel configurations.
//!
//! - [`plan`](mod@plan): from a problem to ranked kernels, with their accounts of registers and shared
//!   memory, and reasons for the others; [`why`] asks about single candidates;
//! - [`kernels`]: for each kernel its candidates, account and cost; [`refusals`]: those that a compiler is
//!   known to spill;
//! - [`timeline`]: the order of a steady step, by the same model;
//! - [`account`]: what launching a kernel needs to know of it, the part that `fa-kernels` uses;
//! - [`divide`](mod@divide): how a kernel's work is divided among CTAs, the rest of what a call launches;
//! - [`cost`]: predicted time, with its bottleneck; [`banks`]: conflicts in shared memory; [`occupancy`]:
//!   CTAs per SM;
//! - [`guide`]: the model of the SM90 block size tuning guide, and its search.
//!
//! No I/O and no CUDA: a plan is made of a [`fa_core::Problem`] and the limits of a [`fa_core::Arch`].
//!
//! ```
//! use fa_core::{Arch, Dtype, Mask, Problem};
//! use fa_planner::plan::{PlanOptions, explore};
//!
//! // Batch 2, 8192 queries and keys, 16 heads of 128, causal, on an H100.
//! let problem = Problem::square(2, 8192, 16, 128, Mask::CAUSAL, Dtype::Bf16);
//! let set = explore(&problem, Arch::Sm90, &PlanOptions::default())?;
//!
//! let best = &set.plans[0];
//! assert!(best.smem.total <= 232_448);
//! println!("{}: {:.0} us, bound by {:?}", best.spec, best.cost.seconds * 1e6, best.cost.bottleneck);
//! for rejected in &set.rejected {
//!     println!("{}: {}", rejected.spec, rejected.reason);
//! }
//! # Ok::<(), fa_planner::plan::PlanError>(())
//! ```

pub mod account;
pub mod banks;
pub mod cost;
pub mod divide;
pub mod guide;
pub mod head_dims;
pub mod kernels;
pub mod occupancy;
pub mod plan;
pub mod refusals;
pub mod registers;
#[cfg(feature = "reports")]
pub mod report;
pub mod smem;
#[cfg(feature = "reports")]
mod table;
pub mod tally;
pub mod timeline;
#[cfg(feature = "reports")]
pub mod why;
pub mod work;

pub use divide::divide;
pub use guide::mode::{Mode, ParseModeError};
pub use head_dims::{HeadDims, HeadDimsError};
