//! Enumerates, checks and ranks kernel configurations.
pub mod banks;
pub mod cost;
pub mod head_dims;
pub mod mode;
pub mod occupancy;
pub mod plan;
pub mod sm100;
pub mod sm80;
pub mod sm90;
pub mod smem;

pub use head_dims::{HeadDims, HeadDimsError};
pub use mode::{Mode, ParseModeError};
