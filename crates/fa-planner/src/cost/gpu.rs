//! What a prediction knows of the GPU.

use fa_core::{Arch, ArchLimits};

use super::constants::CostConstants;

/// The GPU that costs are predicted for.
#[derive(Clone, Copy)]
pub(crate) struct Gpu<'a> {
    /// Its architecture, which decides the code.
    pub arch: Arch,
    /// The limits and rates of its board.
    pub limits: &'a ArchLimits,
    /// What the model assumes beyond these.
    pub constants: &'a CostConstants,
}
