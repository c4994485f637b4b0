//! The SM90 forward: wgmma and TMA.

pub mod account;
pub mod candidates;
pub mod cost;
pub(crate) mod timeline;

use fa_core::{Arch, Kernel, KernelSpec, Sm90Fwd};

use crate::account::code::Code;
use crate::cost::core::Cost;
use crate::cost::kv_splits::best_of;
use crate::kernels::folder::functions_of_the_folder;
use crate::kernels::planned::{Forward, ForwardTime, PlannedKernel, Time, Wanted};
use crate::registers::Registers;

impl PlannedKernel for Sm90Fwd {
    functions_of_the_folder!();

    fn head_dims(&self) -> &'static [u32] {
        &account::HEAD_DIMS
    }

    fn code(&self) -> Code {
        Code { varied: true, paged: true, codes: true, split: true, packs_gqa: true, ..Code::DENSE }
    }

    fn candidates<'a>(&self, wanted: Wanted<'a>) -> Box<dyn Iterator<Item = KernelSpec> + 'a> {
        let Wanted { problem, head_dim, head_dim_v, division, .. } = wanted;
        Box::new(candidates::candidates(problem, head_dim, head_dim_v, division))
    }

    fn registers(&self, spec: &KernelSpec, _: Arch) -> Registers {
        account::registers(spec, self)
    }

    fn unbound(&self) -> Option<Kernel> {
        Some(Sm90Fwd { kv_stages: 2, ..self.clone() }.into())
    }

    fn time(&self) -> Time<'_> {
        Time::Forward(self)
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
