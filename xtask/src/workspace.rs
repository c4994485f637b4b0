//! Where the workspace lies, and cargo run in it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The workspace's root.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace")
}

/// Cargo's target folder.
pub fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |dir| root().join(dir))
}

/// Cargo with these arguments, in the workspace's root.
pub fn cargo_command(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(root());
    command
}

/// Runs cargo in the workspace's root.
pub fn cargo(args: &[&str]) -> Result<()> {
    let status = cargo_command(args).status().context("cargo does not start")?;
    ensure!(status.success(), "cargo {} failed ({status})", args.join(" "));
    Ok(())
}

/// Builds the program `fa` and runs one of its commands.
pub fn fa(command: &str, flags: &[String]) -> Result<()> {
    let mut args = vec!["run", "--quiet", "--release", "-p", "fa-cli", "--", command];
    args.extend(flags.iter().map(String::as_str));
    cargo(&args)
}
