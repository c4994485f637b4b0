//! The SM90 forward: wgmma and TMA.

pub mod account;
pub mod candidates;
pub mod cost;
pub mod spills;
pub(crate) mod timeline;

use fa_core::{Arch, KernelSpec, Sm90Fwd};

use crate::account::code::Code;
use crate::account::kv_splits::best_of;
use crate::cost::core::{Cost, StepClocks};
use crate::kernels::planned::{Forward, ForwardTime, PlannedKernel, Time, Wanted};
use crate::registers::Registers;
use crate::smem::SmemPlan;
use crate::timeline::lanes::Timeline;

impl PlannedKernel for Sm90Fwd {
    fn head_dims(&self) -> &'static [u32] {
        &account::HEAD_DIMS
    }

    fn code(&self) -> Code {
        Code { varied: true, paged: true, split: true, packs_gqa: true, ..Code::DENSE }
    }

    fn candidates<'a>(&self, wanted: Wanted<'a>) -> Box<dyn Iterator<Item = KernelSpec> + 'a> {
        let Wanted { problem, head_dim, head_dim_v, division, .. } = wanted;
        Box::new(candidates::candidates(problem, head_dim, head_dim_v, division))
    }

    fn smem(&self, spec: &KernelSpec) -> SmemPlan {
        account::smem(spec, self)
    }

    fn registers(&self, spec: &KernelSpec, _: Arch) -> Registers {
        account::registers(spec, self)
    }

    fn is_known_to_spill(&self, spec: &KernelSpec, _: Arch) -> bool {
        spills::known(spec, self)
    }

    fn time(&self) -> Time<'_> {
        Time::Forward(self)
    }

    fn timeline(&self, spec: &KernelSpec, copy: &dyn Fn(u32) -> f64, clocks: &StepClocks) -> Timeline {
        timeline::timeline(spec, self, copy, clocks)
    }
}

impl ForwardTime for Sm90Fwd {
    fn best_split(&self, forward: &Forward<'_>, below: f64) -> Option<Cost> {
        best_of(&cost::launch(self, forward), forward.spec.split, below)
    }

    fn least_seconds(&self, forward: &Forward<'_>) -> f64 {
        cost::launch(self, forward).at_least(1)
    }
}
