//! SM90 (Hopper): the tuning guide's model of tiles and matrix products, and the exact account beside it.
//!
//! The model is that of the published "SM90 Block Size Tuning Guide": [`candidates`] enumerates, [`fwd::check`] and
//! [`bwd::check`] judge, [`rank`] orders, [`search()`](search::search) runs all three. It knows tensor buffers and
//! accumulators only; [`account`](crate::account) and [`account`] add up what a kernel really declares.

pub mod account;
pub mod bwd;
pub mod candidates;
pub mod fwd;
pub mod kernel;
pub mod mma;
pub mod mode;
pub mod other_archs;
pub mod rank;
pub mod regs;
pub mod reject;
pub mod report;
pub mod search;
pub mod smem;
mod text;
pub mod traffic;
pub mod why;
