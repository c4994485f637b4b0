//! The SM90 forward for wide heads: two warpgroups share the columns of O, and V may be K's first columns.

pub mod account;
pub mod candidates;
mod cost;
pub(crate) mod timeline;

use fa_core::{Arch, KernelSpec, Problem, Sm90Wide};

use crate::account::code::Code;
use crate::kernels::folder::{
    functions_of_a_forward, functions_of_the_folder, functions_of_the_forwards_cost,
};
use crate::kernels::planned::{ForwardTime, PlannedKernel};
use crate::registers::Registers;

/// The largest head dim that other kernels take.
const NARROW: usize = fa_core::spec::WHOLE_ROW_HEAD_DIM as usize;

impl PlannedKernel for Sm90Wide {
    functions_of_the_folder!();
    functions_of_a_forward!();

    fn head_dims(&self) -> &'static [u32] {
        &account::HEAD_DIMS
    }

    fn head_dims_v(&self) -> &'static [u32] {
        &account::HEAD_DIMS_V
    }

    fn takes(&self, problem: &Problem) -> bool {
        problem.latent || problem.head_dim.max(problem.head_dim_v) > NARROW
    }

    fn code(&self) -> Code {
        Code { varied: true, paged: true, split: true, packs_gqa: true, codes: true, ..Code::DENSE }
    }

    fn registers(&self, spec: &KernelSpec, _: Arch) -> Registers {
        account::registers(spec, self)
    }
}

impl ForwardTime for Sm90Wide {
    functions_of_the_forwards_cost!();
}
