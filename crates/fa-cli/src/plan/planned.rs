//! Everything that was planned for a command line.

use fa_core::{Arch, Problem};

use crate::plan::backward::Backward;
use crate::plan::tried::Tried;

/// Everything that was planned for a command line.
#[derive(Debug)]
pub struct Planned {
    /// The architecture.
    pub arch: Arch,
    /// The problem.
    pub problem: Problem,
    /// The forward, when asked for.
    pub forward: Option<Tried>,
    /// The backward, when asked for.
    pub backward: Option<Backward>,
}
