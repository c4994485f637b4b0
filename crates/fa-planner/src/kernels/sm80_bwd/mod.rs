//! The SM80-class backward: mma.sync, cp.async and ldmatrix, on every architecture from 8.0 on.

pub mod account;
pub mod candidates;
pub mod cost;
pub mod spills;
pub(crate) mod timeline;

use fa_core::{Arch, ArchLimits, KernelSpec, Problem, Sm80Bwd};

use crate::account::code::Code;
use crate::account::panels::BwdPanels;
use crate::account::splits::BackwardRates;
use crate::cost::constants::CostConstants;
use crate::cost::core::{Cost, StepClocks};
use crate::cost::cuts::Cuts;
use crate::kernels::planned::{BackwardTime, PlannedKernel, Time, Wanted};
use crate::registers::Registers;
use crate::smem::SmemPlan;
use crate::timeline::lanes::Timeline;

impl PlannedKernel for Sm80Bwd {
    fn head_dims(&self) -> &'static [u32] {
        &super::sm80_fwd::account::HEAD_DIMS
    }

    fn code(&self) -> Code {
        Code { varied: true, ..Code::DENSE }
    }

    fn candidates<'a>(&self, wanted: Wanted<'a>) -> Box<dyn Iterator<Item = KernelSpec> + 'a> {
        let Wanted { problem, head_dim, head_dim_v, arch, deterministic, .. } = wanted;
        Box::new(candidates::candidates(problem, head_dim, head_dim_v, arch, deterministic))
    }

    fn smem(&self, spec: &KernelSpec) -> SmemPlan {
        account::smem(spec, self)
    }

    fn registers(&self, spec: &KernelSpec, arch: Arch) -> Registers {
        account::registers(spec, self, arch)
    }

    fn is_known_to_spill(&self, spec: &KernelSpec, arch: Arch) -> bool {
        spills::known(spec, self, arch)
    }

    fn time(&self) -> Time<'_> {
        Time::Backward(self)
    }

    fn timeline(&self, spec: &KernelSpec, copy: &dyn Fn(u32) -> f64, clocks: &StepClocks) -> Timeline {
        timeline::timeline(spec, self, copy, clocks)
    }
}

impl BackwardTime for Sm80Bwd {
    fn predict(
        &self,
        problem: &Problem,
        spec: &KernelSpec,
        arch: Arch,
        constants: &CostConstants,
        cuts: &mut Cuts,
    ) -> Cost {
        cost::predict(problem, spec, self, arch, constants, cuts)
    }

    fn rates(&self, limits: &ArchLimits, constants: &CostConstants) -> BackwardRates {
        cost::rates(limits, constants)
    }

    fn panels(&self, _: &KernelSpec) -> Option<BwdPanels> {
        None
    }
}
