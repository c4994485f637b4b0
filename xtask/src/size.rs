//! `cargo xtask size`: the stripped release program is under its limit.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::workspace;

/// Build the release program and check that it is under 10 MB stripped, as `strip` of binutils leaves it.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Bytes.
const LIMIT: u64 = 10_000_000;

pub(crate) fn run(_: &Args) -> Result<()> {
    workspace::cargo(&["build", "--quiet", "--release", "-p", "fa-cli"])?;
    let program = workspace::target_dir().join("release").join(format!("fa{}", std::env::consts::EXE_SUFFIX));
    let stripped = program.with_extension("stripped");
    let status = Command::new("strip").arg("-o").args([&stripped, &program]).status();
    ensure!(status.context("strip, of binutils, does not start")?.success(), "strip failed");
    let size = std::fs::metadata(&stripped)?.len();
    std::fs::remove_file(&stripped)?;
    ensure!(size < LIMIT, "{} is {size} bytes stripped, the limit is {LIMIT}", program.display());
    println!("{} is {size} bytes stripped, under {LIMIT}", program.display());
    Ok(())
}
