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

impl Planned {
    /// That no kernel computes the forward's plans, where that is so, and what to plan instead.
    pub fn no_kernel(&self) -> Option<String> {
        let arch = self.arch;
        matches!(self.forward, Some(Tried::Sm100(_))).then(|| {
            format!(
                "no kernel computes these forwards yet, and none has been measured: they are shapes for \
                 tcgen05 that would fit, with predicted rates; --family sm80 plans the kernels that run on \
                 {arch} today"
            )
        })
    }
}
