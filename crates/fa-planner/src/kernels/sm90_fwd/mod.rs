//! The SM90 forward: wgmma and TMA.

pub mod account;
pub mod candidates;
pub mod cost;
pub mod spills;
