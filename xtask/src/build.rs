//! `cargo xtask build`: every shipped kernel for its architectures, by `fa build`.

use std::path::PathBuf;

use anyhow::Result;

use crate::workspace;

/// Compile every shipped spec for its architectures; write cubins, manifest and a table of planned against
/// actual.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only for these architectures.
    #[arg(long, value_delimiter = ',')]
    arch: Vec<fa_core::Arch>,
    /// Where the bundle is written [default: dist].
    #[arg(long)]
    out: Option<PathBuf>,
    /// Further flags of `fa build`, such as --all-configs --headdim 128 --mode bwd.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    flags: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut flags = args.flags.clone();
    if let Some(out) = &args.out {
        flags.extend(["--out".to_owned(), out.to_string_lossy().into_owned()]);
    }
    if !args.arch.is_empty() {
        let archs: Vec<&str> = args.arch.iter().map(|arch| arch.name()).collect();
        flags.extend(["--arch".to_owned(), archs.join(",")]);
    }
    workspace::fa("build", &flags)
}
