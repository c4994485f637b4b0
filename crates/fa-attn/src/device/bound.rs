//! A kernel of either pass, bound to a problem.

use fa_core::{KernelSpec, LaunchPlan, Pass, Problem};
use fa_kernels::{Backward, Forward, Kernels, LoadedKernel};

use crate::error::Error;

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
    /// The kernel of a plan, of either pass, bound to `problem`.
    ///
    /// # Errors
    /// [`fa_kernels::Error::Mismatch`] when the kernel does not compute it, and those of compiling and
    /// loading.
    pub fn of(kernels: &Kernels, problem: &Problem, plan: &LaunchPlan) -> Result<Bound, fa_kernels::Error> {
        Ok(if plan.spec.kernel.is_backward() {
            Bound::Backward(kernels.backward(problem, plan)?)
        } else {
            Bound::Forward(kernels.forward(problem, plan)?)
        })
    }

    /// The forward.
    ///
    /// # Errors
    /// [`Error::Pass`] for a backward.
    pub fn forward(self) -> Result<Forward, Error> {
        match self {
            Bound::Forward(forward) => Ok(forward),
            Bound::Backward(other) => {
                Err(Error::Pass { bound: other.kernel().spec.kernel.pass(), given: Pass::Forward })
            }
        }
    }

    /// The backward.
    ///
    /// # Errors
    /// [`Error::Pass`] for a forward.
    pub fn backward(self) -> Result<Backward, Error> {
        match self {
            Bound::Forward(_) => Err(Error::Pass { bound: Pass::Forward, given: Pass::BACKWARD }),
            Bound::Backward(backward) => Ok(backward),
        }
    }

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

    /// The kernel's spec, and how it divides the work among CTAs.
    pub fn launch_plan(&self) -> &LaunchPlan {
        match self {
            Bound::Forward(forward) => forward.launch_plan(),
            Bound::Backward(backward) => backward.launch_plan(),
        }
    }

    /// Bytes of workspace that a call needs.
    pub fn workspace_bytes(&self) -> usize {
        match self {
            Bound::Forward(forward) => forward.workspace_bytes(),
            Bound::Backward(backward) => backward.workspace_bytes(),
        }
    }
}
