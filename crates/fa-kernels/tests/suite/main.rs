//! Tests that need no GPU. Those that compile need NVRTC: `cargo xtask toolkit` installs it.

mod agreement;
mod cache;
mod code;
mod device_sources;
mod divided;
mod errors;
mod generated;
mod launches;
mod launches_beside;
mod launches_divided;
mod programs;
mod shipped;
mod tensor_memory;
mod toolchain;

#[path = "../../../fa-core/tests/strategies/problems.rs"]
mod problems;
#[path = "../../../fa-core/tests/strategies/programs.rs"]
mod random;

use std::process::Command;

use fa_core::{
    Arch, Dtype, Kernel, KernelSpec, MaskKind, Problem, Reads, ScoreKind, Sm80Fwd, Sm90Fwd, Types,
};
use fa_kernels::launch::Launches;
use fa_kernels::{Compiler, CompilerKind, Error, Source};
use fa_planner::divide;

/// NVRTC, or a failure that says how to get it.
fn nvrtc() -> Compiler {
    Compiler::find(CompilerKind::Nvrtc).unwrap_or_else(|error| panic!("{error}"))
}

/// A unit of one small kernel; `salt` makes units differ.
fn small_source(salt: u32) -> Source {
    Source {
        unit: format!(
            "#include \"scale.cuh\"\nextern \"C\" __global__ void fa_kernel(float* x) {{ x[threadIdx.x] = \
             scale(x[threadIdx.x], {salt}.f); }}\n"
        ),
        headers: vec![(
            "scale.cuh".into(),
            "#pragma once\n__device__ float scale(float x, float by) { return x * by; }\n".into(),
        )],
        target: "sm_80".into(),
    }
}

/// What a kernel launches, divided as the planner does.
fn launches_of(spec: &KernelSpec, problem: &Problem, arch: Arch, sms: u32) -> Result<Launches, Error> {
    launches_in_parts(spec, problem, arch, sms, None)
}

/// [`launches_of`] with the keys of a tile in as many parts as a caller wants.
fn launches_in_parts(
    spec: &KernelSpec,
    problem: &Problem,
    arch: Arch,
    sms: u32,
    splits: Option<usize>,
) -> Result<Launches, Error> {
    Launches::of(&divide(problem, spec, arch, sms, splits), problem, arch, sms)
}

fn sm80_spec() -> KernelSpec {
    KernelSpec {
        types: Types::same(Dtype::Bf16),
        head_dim: 64,
        head_dim_v: 64,
        mask: MaskKind::Causal,
        score: ScoreKind::NONE,
        reads: Reads::UNIFORM,
        split: false,
        kernel: Kernel::Sm80Fwd(Sm80Fwd::default()),
    }
}

fn sm90_spec() -> KernelSpec {
    KernelSpec { kernel: Kernel::Sm90Fwd(Sm90Fwd::default()), ..sm80_spec() }
}

/// This test program again, running the one (ignored) test `name`: how tests get processes of their own.
fn child(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a running program has a file"));
    command.args(["--exact", name, "--ignored", "--nocapture", "--quiet"]);
    command
}
