//! The SM90 backward: wgmma and TMA.

pub mod account;
pub mod candidates;
pub mod cost;
pub(crate) mod timeline;

use fa_core::{Arch, Kernel, KernelSpec, Sm90Bwd};

use crate::account::code::Code;
use crate::account::panels::BwdPanels;
use crate::kernels::folder::{functions_of_the_backwards_cost, functions_of_the_folder};
use crate::kernels::planned::{BackwardTime, PlannedKernel, Time, Wanted};
use crate::registers::Registers;

impl PlannedKernel for Sm90Bwd {
    functions_of_the_folder!();

    fn head_dims(&self) -> &'static [u32] {
        &account::HEAD_DIMS
    }

    fn code(&self) -> Code {
        Code { varied: true, ..Code::DENSE }
    }

    fn candidates<'a>(&self, wanted: Wanted<'a>) -> Box<dyn Iterator<Item = KernelSpec> + 'a> {
        let Wanted { problem, head_dim, head_dim_v, deterministic, .. } = wanted;
        Box::new(candidates::candidates(problem, head_dim, head_dim_v, deterministic))
    }

    fn registers(&self, spec: &KernelSpec, _: Arch) -> Registers {
        account::registers(spec, self)
    }

    fn unbound(&self) -> Option<Kernel> {
        Some(Sm90Bwd { persistent: false, whole_keys: false, dq_via_smem: true, ..self.clone() }.into())
    }

    fn time(&self) -> Time<'_> {
        Time::Backward(self)
    }
}

impl BackwardTime for Sm90Bwd {
    functions_of_the_backwards_cost!();

    fn panels(&self, spec: &KernelSpec) -> Option<BwdPanels> {
        Some(BwdPanels::of(spec, self))
    }
}
