//! `cargo xtask validate`: the GPU kernels against the CPU oracle, by `fa validate`.

use anyhow::Result;

use crate::workspace;

/// Validate the GPU kernels on the GPU at hand: builds and runs `fa validate`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Kernels to validate, sm80 or sm90 [default: the fastest that the GPU runs].
    #[arg(long, alias = "arch")]
    family: Option<String>,
    /// Flags of `fa validate`, such as --full, --all-configs or --record.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    flags: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut flags = args.flags.clone();
    if let Some(family) = &args.family {
        flags.extend(["--family".to_owned(), family.clone()]);
    }
    workspace::fa("validate", &flags)
}
