//! Enumerates, checks and ranks kernel configurations.
pub mod banks;
pub mod sm90;
pub mod smem;
