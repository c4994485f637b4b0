//! The kernels, one folder each: `candidates` enumerates what is tried for a problem, `account` adds up registers and
//! shared memory, `spills` lists what the compiler is known to spill, `cost` predicts the time.

pub mod sm100_fwd;
pub mod sm80_bwd;
pub mod sm80_fwd;
pub mod sm90_bwd;
pub mod sm90_fwd;
