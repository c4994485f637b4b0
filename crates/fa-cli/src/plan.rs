//! What `fa plan` found, and its presentation.

pub mod backward;
pub mod guide;
pub mod kernels;
pub mod splits;
pub mod tried;
pub mod why;
