//! The SM80-class backward: mma.sync, cp.async and ldmatrix, on every architecture from 8.0 on.

pub mod account;
pub mod candidates;
pub mod cost;
pub(crate) mod timeline;

use fa_core::{Arch, KernelSpec, Sm80Bwd};

use crate::account::code::Code;
use crate::account::panels::BwdPanels;
use crate::kernels::folder::{functions_of_the_backwards_cost, functions_of_the_folder};
use crate::kernels::planned::{BackwardTime, PlannedKernel, Time, Wanted};
use crate::registers::Registers;

impl PlannedKernel for Sm80Bwd {
    functions_of_the_folder!();

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

    fn registers(&self, spec: &KernelSpec, arch: Arch) -> Registers {
        account::registers(spec, self, arch)
    }

    fn time(&self) -> Time<'_> {
        Time::Backward(self)
    }
}

impl BackwardTime for Sm80Bwd {
    functions_of_the_backwards_cost!();

    fn panels(&self, _: &KernelSpec) -> Option<BwdPanels> {
        None
    }
}
