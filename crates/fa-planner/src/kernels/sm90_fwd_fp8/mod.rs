//! The SM90 forward of e4m3 tensors: wgmma on 8 bits and TMA, V transposed on chip.

pub mod account;
pub mod candidates;
pub mod cost;
pub(crate) mod timeline;

use fa_core::{Arch, KernelSpec, Sm90FwdFp8};

use crate::account::code::Code;
use crate::cost::core::Cost;
use crate::cost::kv_splits::best_of;
use crate::kernels::folder::functions_of_the_folder;
use crate::kernels::planned::{Forward, ForwardTime, PlannedKernel, Time, Wanted};
use crate::registers::Registers;

impl PlannedKernel for Sm90FwdFp8 {
    functions_of_the_folder!();

    fn head_dims(&self) -> &'static [u32] {
        &account::HEAD_DIMS
    }

    fn code(&self) -> Code {
        Code {
            varied: true,
            paged: true,
            split: true,
            programs: false,
            packs_gqa: true,
            codes: true,
            ..Code::DENSE
        }
    }

    fn candidates<'a>(&self, wanted: Wanted<'a>) -> Box<dyn Iterator<Item = KernelSpec> + 'a> {
        let Wanted { problem, head_dim, head_dim_v, division, .. } = wanted;
        Box::new(candidates::candidates(problem, head_dim, head_dim_v, division))
    }

    fn registers(&self, spec: &KernelSpec, _: Arch) -> Registers {
        account::registers(spec, self)
    }

    fn time(&self) -> Time<'_> {
        Time::Forward(self)
    }
}

impl ForwardTime for Sm90FwdFp8 {
    fn best_split(&self, forward: &Forward<'_>, below: f64) -> Option<Cost> {
        best_of(&cost::launch(self, forward), forward.spec.split, below)
    }

    fn least_seconds(&self, forward: &Forward<'_>) -> f64 {
        cost::launch(self, forward).at_least(1)
    }
}
