//! A problem to tune.

use fa_core::{Family, Pass, Problem};

/// A problem to find the fastest kernel for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wanted {
    /// The problem, of a 16-bit type.
    pub problem: Problem,
    /// Kernels to choose from; `None` for the fastest family that the GPU runs.
    pub family: Option<Family>,
    /// The pass.
    pub pass: Pass,
}
