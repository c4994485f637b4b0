//! A kernel of either pass, bound to a problem.

use fa_core::KernelSpec;
use fa_kernels::{Backward, Forward, LoadedKernel};

/// A kernel bound to a problem.
#[derive(Debug)]
// A handful exist at a time; a box would only be in the way.
#[allow(clippy::large_enum_variant)]
pub enum Bound {
    /// O and LSE.
    Forward(Forward),
    /// dQ, dK and dV.
    Backward(Backward),
}

impl Bound {
    /// The kernel.
    pub fn kernel(&self) -> &LoadedKernel {
        match self {
            Bound::Forward(forward) => forward.kernel(),
            Bound::Backward(backward) => backward.kernel(),
        }
    }

    /// The spec of the kernel.
    pub fn spec(&self) -> &KernelSpec {
        &self.kernel().spec
    }

    /// Bytes of workspace that a call needs.
    pub fn workspace_bytes(&self) -> usize {
        match self {
            Bound::Forward(forward) => forward.workspace_bytes(),
            Bound::Backward(backward) => backward.workspace_bytes(),
        }
    }
}
