//! The SM80-class forward: mma.sync, cp.async and ldmatrix, on every architecture from 8.0 on.

pub mod account;
pub mod candidates;
pub mod cost;
pub mod spills;
