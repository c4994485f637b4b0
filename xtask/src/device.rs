//! `cargo xtask device`: the format of the CUDA sources.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{toolkit, workspace};

/// Format the CUDA sources by .clang-format, with the clang-format of `cargo xtask toolkit`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Change nothing, fail where a file is not formatted.
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    toolkit::install(false)?;
    format(args.check)
}

/// Formats the headers of every crate's `cuda` folder, or checks that they are formatted.
pub(crate) fn format(check: bool) -> Result<()> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(workspace::root().join("crates"))? {
        let folder = entry?.path().join("cuda");
        if folder.is_dir() {
            list(&folder, &mut files).with_context(|| folder.display().to_string())?;
        }
    }
    ensure!(!files.is_empty(), "no CUDA sources in crates/*/cuda");
    let program = toolkit::clang_format();
    let mode: &[&str] = if check { &["--dry-run", "-Werror"] } else { &["-i"] };
    let status = Command::new(&program)
        .arg("--style=file")
        .args(mode)
        .args(&files)
        .current_dir(workspace::root())
        .status()
        .with_context(|| format!("{} does not start: run `cargo xtask toolkit`", program.display()))?;
    ensure!(status.success(), "CUDA sources are not formatted: run `cargo xtask device`");
    Ok(())
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            list(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "cuh" || extension == "cu") {
            files.push(path);
        }
    }
    Ok(())
}
