//! The SM90 forward of e4m3 tensors: wgmma on 8 bits and TMA, V transposed on chip.

pub mod account;
pub mod candidates;
pub mod cost;
pub(crate) mod timeline;

use fa_core::{Arch, KernelSpec, Sm90FwdFp8};

use crate::account::code::Code;
use crate::kernels::folder::{
    functions_of_a_forward, functions_of_the_folder, functions_of_the_forwards_cost,
};
use crate::kernels::planned::{ForwardTime, PlannedKernel};
use crate::registers::Registers;

impl PlannedKernel for Sm90FwdFp8 {
    functions_of_the_folder!();
    functions_of_a_forward!();

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

    fn registers(&self, spec: &KernelSpec, _: Arch) -> Registers {
        account::registers(spec, self)
    }
}

impl ForwardTime for Sm90FwdFp8 {
    functions_of_the_forwards_cost!();
}
