//! `cargo xtask build`: every shipped kernel for its architectures, by `fa build`.

use std::path::PathBuf;

use anyhow::Result;

use crate::workspace;

/// Compile every spec in specs/ for its architectures; write cubins, manifest and a table of planned against actual.
#[derive(clap::Args)]
pub struct Args {
    /// Only for these architectures.
    #[arg(long, value_delimiter = ',')]
    arch: Vec<fa_core::Arch>,
    /// Where the bundle is written.
    #[arg(long, default_value = "dist")]
    out: PathBuf,
}

pub fn run(args: &Args) -> Result<()> {
    let out = args.out.to_string_lossy();
    let mut command = vec!["run", "--quiet", "--release", "-p", "fa-cli", "--", "build", "--out", &out];
    let archs: Vec<&str> = args.arch.iter().map(|arch| arch.name()).collect();
    let archs = archs.join(",");
    if !archs.is_empty() {
        command.extend(["--arch", &archs]);
    }
    workspace::cargo(&command)
}
