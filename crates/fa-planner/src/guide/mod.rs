//! The model of the published "SM90 Block Size Tuning Guide", and its search.
//!
//! [`candidates`] enumerates, [`fwd::check`] and [`bwd::check`] judge, [`rank`] orders,
//! [`search()`](search::search) runs all three. The model counts tensor buffers and accumulators only;
//! [`account`] adds up what a kernel really declares. [`report`] is what `fa plan --guide` and `cargo xtask
//! search` print; on other architectures it lists the planner's own tiles ([`other_archs`]).

pub mod account;
pub mod bwd;
pub mod candidates;
pub mod fwd;
pub mod kernel;
pub mod mma;
pub mod mode;
#[cfg(feature = "reports")]
pub mod other_archs;
pub mod rank;
pub mod regs;
pub mod reject;
#[cfg(feature = "reports")]
pub mod report;
pub mod search;
pub mod smem;
#[cfg(feature = "reports")]
mod text;
pub mod traffic;
#[cfg(feature = "reports")]
pub mod why;
