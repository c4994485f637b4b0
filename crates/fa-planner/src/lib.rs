//! Enumerates, checks and ranks kernel configurations.
pub mod banks;
pub mod head_dims;
pub mod mode;
pub mod sm90;
pub mod smem;

pub use head_dims::{HeadDims, HeadDimsError};
pub use mode::{Mode, ParseModeError};
