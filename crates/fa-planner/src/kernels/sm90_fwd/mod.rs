//! The SM90 forward: wgmma and TMA.

pub mod account;
pub mod candidates;
pub mod cost;
pub(crate) mod timeline;

use fa_core::{Arch, Kernel, KernelSpec, Sm90Fwd};

use crate::account::code::Code;
use crate::kernels::folder::{
    functions_of_a_forward, functions_of_the_folder, functions_of_the_forwards_cost,
};
use crate::kernels::planned::{ForwardTime, PlannedKernel};
use crate::registers::Registers;

impl PlannedKernel for Sm90Fwd {
    functions_of_the_folder!();
    functions_of_a_forward!();

    fn head_dims(&self) -> &'static [u32] {
        &account::HEAD_DIMS
    }

    fn code(&self) -> Code {
        Code { varied: true, paged: true, codes: true, split: true, packs_gqa: true, ..Code::DENSE }
    }

    fn registers(&self, spec: &KernelSpec, _: Arch) -> Registers {
        account::registers(spec, self)
    }

    fn unbound(&self) -> Option<Kernel> {
        Some(Sm90Fwd { kv_stages: 2, ..self.clone() }.into())
    }
}

impl ForwardTime for Sm90Fwd {
    functions_of_the_forwards_cost!();
}
