//! Enumerates, checks and ranks kernel configurations.
pub mod banks;
