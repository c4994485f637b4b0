//! What the planner asks of a kernel, whichever it is: [`of`] takes a spec to its kernel's folder.

use fa_core::{Arch, ArchLimits, Division, Kernel, KernelSpec, Problem, each_kernel};

use crate::account::code::Code;
use crate::account::panels::BwdPanels;
use crate::cost::constants::CostConstants;
use crate::cost::cuts::Cuts;
use crate::cost::gpu::Gpu;
use crate::cost::head_splits::BackwardRates;
use crate::cost::predicted::{Cost, StepClocks};
use crate::registers::Registers;
use crate::smem::SmemPlan;
use crate::timeline::lanes::Timeline;
use crate::work::Work;

/// A kernel's part of the planner, implemented for its parameters in the kernel's folder.
pub(crate) trait PlannedKernel {
    /// Extents of the head dims of its tiles, in ascending order.
    fn head_dims(&self) -> &'static [u32];

    /// The same of V and O.
    fn head_dims_v(&self) -> &'static [u32] {
        self.head_dims()
    }

    /// Whether it is the kernel of its family and pass for `problem`, by head dims and form.
    fn takes(&self, problem: &Problem) -> bool {
        let widest = self.head_dims().last().map_or(0, |&widest| widest as usize);
        !problem.latent && problem.head_dim.max(problem.head_dim_v) <= widest
    }

    /// The features of its device code.
    fn code(&self) -> Code;

    /// Every candidate of its kind, whatever the parameters of this one.
    fn candidates<'a>(&self, wanted: Wanted<'a>) -> Box<dyn Iterator<Item = KernelSpec> + 'a>;

    /// Shared memory of a CTA, buffer by buffer.
    fn smem(&self, spec: &KernelSpec) -> SmemPlan;

    /// Registers of a computing thread.
    fn registers(&self, spec: &KernelSpec, arch: Arch) -> Registers;

    /// The kernel without what its launch bounds promise, and without switches that are newer than most
    /// records of measurements: one of several kernels that count as the same there. `None` where it is that
    /// already.
    fn unbound(&self) -> Option<Kernel> {
        None
    }

    /// Its time model.
    fn time(&self) -> Time<'_>;

    /// The order of its main loop; `copy` gives the clocks in which an SM loads this many elements.
    fn timeline(&self, spec: &KernelSpec, copy: &dyn Fn(u32) -> f64, clocks: &StepClocks) -> Timeline;
}

/// What candidates are wanted for.
#[derive(Clone, Copy)]
pub(crate) struct Wanted<'a> {
    pub problem: &'a Problem,
    /// Tile extents of the head dims.
    pub head_dim: u32,
    pub head_dim_v: u32,
    pub arch: Arch,
    /// Of a backward: whether equal inputs give equal bits.
    pub deterministic: bool,
    /// Of a forward: what the caller decides.
    pub division: Division,
}

/// A kernel's time model, by its pass.
pub(crate) enum Time<'a> {
    Forward(&'a dyn ForwardTime),
    Backward(&'a dyn BackwardTime),
}

/// How long a forward takes.
pub(crate) trait ForwardTime {
    /// The cost with the best number of splits; `None` where no number of splits can take less than `below`
    /// seconds.
    fn best_split(&self, forward: &Forward<'_>, below: f64) -> Option<Cost>;

    /// A lower bound in seconds with the keys of a tile undivided.
    fn least_seconds(&self, forward: &Forward<'_>) -> f64;
}

/// A forward on a GPU of given limits.
#[derive(Clone, Copy)]
pub(crate) struct Forward<'a> {
    pub problem: &'a Problem,
    pub spec: &'a KernelSpec,
    /// The problem in the kernel's tiles, or a lower bound on them.
    pub work: &'a Work,
    pub limits: &'a ArchLimits,
    pub constants: &'a CostConstants,
}

/// How long a backward takes.
pub(crate) trait BackwardTime {
    /// Preprocess and postprocess included.
    fn predict(&self, problem: &Problem, spec: &KernelSpec, gpu: Gpu<'_>, cuts: &mut Cuts) -> Cost;

    /// The rates by which the number of CTAs that share a group's heads is chosen.
    fn rates(&self, limits: &ArchLimits, constants: &CostConstants) -> BackwardRates;

    /// Panels of the tiles that it loads by TMA; `None` where threads copy them.
    fn panels(&self, spec: &KernelSpec) -> Option<BwdPanels>;
}

/// `spec` without what its launch bounds promise, and without switches that are newer than most records:
/// specs for which this is equal count as one kernel in records of measurements.
pub fn unbound(spec: &KernelSpec) -> KernelSpec {
    let kernel = of(&spec.kernel).unbound().unwrap_or_else(|| spec.kernel.clone());
    KernelSpec { kernel, ..spec.clone() }
}

/// The kernel of a spec.
pub(crate) fn of(kernel: &Kernel) -> &dyn PlannedKernel {
    each_kernel!(kernel, params => params)
}
