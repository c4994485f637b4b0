//! From a loaded kernel to a launch: a problem's parameters, tensor maps and workspace, and the calls on a stream.

pub(crate) mod args;
pub(crate) mod backward;
pub(crate) mod forward;
pub(crate) mod module;
mod sections;
mod tma;
