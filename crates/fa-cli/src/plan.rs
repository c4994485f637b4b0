//! What `fa plan` found, and its presentation.

pub(crate) mod backward;
pub(crate) mod guide;
pub(crate) mod kernels;
pub(crate) mod splits;
pub(crate) mod tried;
pub(crate) mod why;
