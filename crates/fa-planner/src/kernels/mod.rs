//! The kernels, one folder each, with the same files in each:
//!
//! - `candidates` enumerates the configurations that are tried for a problem, without judging them;
//! - `account` adds up shared memory and registers;
//! - `spills` lists configurations that the compiler is known to spill although the account has room (none is
//!   known for `sm80_fwd`, and `sm100_fwd` has no kernel to compile);
//! - `cost` predicts the time.

pub mod sm100_fwd;
pub mod sm80_bwd;
pub mod sm80_fwd;
pub mod sm90_bwd;
pub mod sm90_fwd;
