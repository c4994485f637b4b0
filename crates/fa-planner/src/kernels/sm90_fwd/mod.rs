//! The SM90 forward: wgmma and TMA.

pub mod candidates;
pub mod spills;
