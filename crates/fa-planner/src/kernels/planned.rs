//! What the planner asks of a kernel, whichever it is: [`of`] takes a spec to its kernel's folder.

use fa_core::{Arch, ArchLimits, Division, Kernel, KernelSpec, Problem, each_kernel};

use crate::account::code::Code;
use crate::account::panels::BwdPanels;
use crate::account::splits::BackwardRates;
use crate::cost::constants::CostConstants;
use crate::cost::core::{Cost, StepClocks};
use crate::cost::cuts::Cuts;
use crate::cost::schedule::Work;
use crate::registers::Registers;
use crate::smem::SmemPlan;
use crate::timeline::lanes::Timeline;

/// A kernel as the planner sees it, implemented for its parameters in the kernel's folder.
pub(crate) trait PlannedKernel {
    /// Extents of the head dims of its tiles, in ascending order.
    fn head_dims(&self) -> &'static [u32];

    /// What its device code has.
    fn code(&self) -> Code;

    /// Every kernel of its kind that is tried, whatever the parameters of this one.
    fn candidates<'a>(&self, wanted: Wanted<'a>) -> Box<dyn Iterator<Item = KernelSpec> + 'a>;

    /// Shared memory of a CTA, buffer by buffer.
    fn smem(&self, spec: &KernelSpec) -> SmemPlan;

    /// Registers of a computing thread.
    fn registers(&self, spec: &KernelSpec, arch: Arch) -> Registers;

    /// Whether the compiler is known to spill although the account has room.
    fn is_known_to_spill(&self, spec: &KernelSpec, arch: Arch) -> bool;

    /// Its model of time.
    fn time(&self) -> Time<'_>;

    /// The order of its main loop; `copy` gives the clocks in which an SM loads so many elements.
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

/// A kernel's model of time, by what it computes.
pub(crate) enum Time<'a> {
    Forward(&'a dyn ForwardTime),
    Backward(&'a dyn BackwardTime),
}

/// How long a forward takes.
pub(crate) trait ForwardTime {
    /// With the number of splits that takes the least time; `None` where no number of splits can take less
    /// than `below` seconds.
    fn best_split(&self, forward: &Forward<'_>, below: f64) -> Option<Cost>;

    /// Seconds that it takes at least with the keys of a tile undivided.
    fn least_seconds(&self, forward: &Forward<'_>) -> f64;
}

/// A forward on a GPU of given limits.
#[derive(Clone, Copy)]
pub(crate) struct Forward<'a> {
    pub problem: &'a Problem,
    pub spec: &'a KernelSpec,
    /// The problem in the kernel's tiles, or what these are at least.
    pub work: &'a Work,
    pub limits: &'a ArchLimits,
    pub constants: &'a CostConstants,
}

/// How long a backward takes.
pub(crate) trait BackwardTime {
    /// Preprocess and postprocess included.
    fn predict(
        &self,
        problem: &Problem,
        spec: &KernelSpec,
        arch: Arch,
        constants: &CostConstants,
        cuts: &mut Cuts,
    ) -> Cost;

    /// What the number of CTAs that share a group's heads is chosen by.
    fn rates(&self, limits: &ArchLimits, constants: &CostConstants) -> BackwardRates;

    /// Panels of the tiles that it loads by TMA; `None` where threads copy them.
    fn panels(&self, spec: &KernelSpec) -> Option<BwdPanels>;
}

/// The kernel of a spec.
pub(crate) fn of(kernel: &Kernel) -> &dyn PlannedKernel {
    each_kernel!(kernel, params => params)
}
