//! The SM80-class forward: mma.sync, cp.async and ldmatrix, on every architecture from 8.0 on.

pub mod account;
pub mod candidates;
pub mod cost;
pub(crate) mod timeline;

use fa_core::{Arch, Kernel, KernelSpec, Sm80Fwd};

use crate::account::code::Code;
use crate::kernels::folder::{functions_of_a_forward, functions_of_the_folder};
use crate::kernels::planned::PlannedKernel;
use crate::registers::Registers;

impl PlannedKernel for Sm80Fwd {
    functions_of_the_folder!();
    functions_of_a_forward!();

    fn head_dims(&self) -> &'static [u32] {
        &account::HEAD_DIMS
    }

    fn code(&self) -> Code {
        Code { varied: true, paged: true, codes: true, split: true, packs_gqa: true, ..Code::DENSE }
    }

    fn registers(&self, spec: &KernelSpec, arch: Arch) -> Registers {
        account::registers(spec, self, arch.limits())
    }

    fn unbound(&self) -> Option<Kernel> {
        Some(Sm80Fwd { blocks_per_sm: 1, ..self.clone() }.into())
    }
}
