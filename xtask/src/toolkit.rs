//! `cargo xtask toolkit`: NVRTC, the disassemblers and clang-format from PyPI into the target folder, for
//! machines with no CUDA.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::workspace;

/// Install NVRTC, nvdisasm, cuobjdump and clang-format from PyPI into target/toolkit.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Install again even if the versions wanted are there.
    #[arg(long)]
    force: bool,
}

/// NVRTC is held at one minor version, so that the code it makes does not change under us; the disassemblers
/// read the cubins of every version before their own. Every version of clang-format formats in its own way.
const PACKAGES: [&str; 4] = [
    "nvidia-cuda-nvrtc==13.0.*",
    "nvidia-cuda-nvdisasm>=13,<14",
    "nvidia-cuda-cuobjdump>=13,<14",
    "clang-format==19.1.7",
];

/// Names what was installed, so that a second call is free.
const STAMP: &str = "packages.txt";

pub(crate) fn run(args: &Args) -> Result<()> {
    install(args.force)
}

/// Installs the packages unless they are there; with `force`, in any case.
pub(crate) fn install(force: bool) -> Result<()> {
    packages(&folder(), &PACKAGES, force)
}

/// Installs packages of PyPI in `folder` unless they are there; with `force`, in any case.
pub(crate) fn packages(folder: &Path, packages: &[&str], force: bool) -> Result<()> {
    if !force && is_current(folder, packages) {
        println!("{} is up to date", folder.display());
        return Ok(());
    }
    std::fs::create_dir_all(folder)?;
    let python = if cfg!(windows) { "python" } else { "python3" };
    let status = Command::new(python)
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade"])
        .args(["--only-binary=:all:", "--target"])
        .arg(folder)
        .args(packages)
        .env("PIP_ROOT_USER_ACTION", "ignore")
        .status()
        .with_context(|| format!("{python} does not start: install Python 3 with pip"))?;
    ensure!(status.success(), "pip failed ({status}); it has to reach a Python package index");
    std::fs::write(folder.join(STAMP), packages.join("\n"))?;
    println!("installed {} in {}", packages.join(", "), folder.display());
    Ok(())
}

fn folder() -> PathBuf {
    workspace::target_dir().join("toolkit")
}

/// clang-format, once installed.
pub(crate) fn clang_format() -> PathBuf {
    folder().join(format!("clang_format/data/bin/clang-format{}", std::env::consts::EXE_SUFFIX))
}

fn is_current(folder: &Path, packages: &[&str]) -> bool {
    std::fs::read_to_string(folder.join(STAMP)).is_ok_and(|stamp| stamp == packages.join("\n"))
}
