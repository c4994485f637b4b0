//! `cargo xtask codegen`: the generated CUDA headers. The generator is the library's own, run as its example,
//! so that xtask itself builds without the CUDA bindings.

use anyhow::Result;

use crate::workspace;

/// Write the generated CUDA headers (config.cuh, params.cuh and those of each launch) from the Rust types.
#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(Args {}: &Args) -> Result<()> {
    workspace::cargo(&["run", "--quiet", "-p", "fa-kernels", "--example", "codegen"])
}
