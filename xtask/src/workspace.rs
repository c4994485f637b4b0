//! Where the workspace lies, and cargo run in it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// The workspace's root.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace")
}

/// Cargo's target folder.
pub(crate) fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |dir| root().join(dir))
}

/// This program's file; where cargo has built it again since it started, the new one.
pub(crate) fn program() -> Result<PathBuf> {
    Ok(standing(std::env::current_exe().context("this program does not find itself")?))
}

/// Linux says of a running program whose file has been replaced that it is deleted.
fn standing(program: PathBuf) -> PathBuf {
    match program.to_str().and_then(|path| path.strip_suffix(" (deleted)")) {
        Some(path) if !program.exists() => PathBuf::from(path),
        _ => program,
    }
}

/// Cargo with these arguments, in the workspace's root.
pub(crate) fn cargo_command(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(root());
    command
}

/// Runs cargo in the workspace's root.
pub(crate) fn cargo(args: &[&str]) -> Result<()> {
    let status = cargo_command(args).status().context("cargo does not start")?;
    ensure!(status.success(), "cargo {} failed ({status})", args.join(" "));
    Ok(())
}

/// The packages that `cargo metadata` with these arguments, run in the workspace's root, names.
pub(crate) fn packages(args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<Vec<serde_json::Value>> {
    let mut command = cargo_command(&["metadata", "--quiet", "--format-version", "1"]);
    let output = command.args(args).output().context("cargo does not start")?;
    ensure!(output.status.success(), "cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr));
    let mut found: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    found["packages"].as_array_mut().map(std::mem::take).context("cargo metadata names no packages")
}

/// What was asked for makes no sense, and asking again will not help: exit code 2, as for arguments that do
/// not parse.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct BadInput(pub String);

/// `fa` has said what is wrong and ended with this code: 1 for what did not pass, 2 for input that makes no
/// sense.
#[derive(Debug, thiserror::Error)]
#[error("fa {command} ended with exit code {code}")]
pub(crate) struct FaEnded {
    command: String,
    pub code: u8,
}

/// Builds the program `fa` and runs one of its commands.
///
/// # Errors
/// [`FaEnded`] when it ends by itself with another code than 0.
pub(crate) fn fa(command: &str, flags: &[String]) -> Result<()> {
    cargo(&["build", "--quiet", "--release", "-p", "fa-cli"])?;
    let mut args = vec!["run", "--quiet", "--release", "-p", "fa-cli", "--", command];
    args.extend(flags.iter().map(String::as_str));
    let status = cargo_command(&args).status().context("cargo does not start")?;
    match status.code().and_then(|code| u8::try_from(code).ok()) {
        Some(0) => Ok(()),
        Some(code) => Err(FaEnded { command: command.to_owned(), code }.into()),
        None => bail!("fa {command} was ended ({status})"),
    }
}

/// Texts of the files below `folder` with this extension, by their paths from it, in order; build outputs are
/// left out.
#[cfg(test)]
pub(crate) fn sources(folder: &Path, extension: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(at) = folders.pop() {
        for entry in std::fs::read_dir(&at).unwrap_or_else(|error| panic!("{}: {error}", at.display())) {
            let path = entry.unwrap().path();
            let is_output = path.file_name().is_some_and(|name| name == "target" || name == ".git");
            if path.is_dir() && !is_output {
                folders.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                let name = path.strip_prefix(folder).unwrap().to_string_lossy().replace('\\', "/");
                found.push((name, std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_was_built_again_is_found_where_it_lies() {
        assert_eq!(standing("/nowhere/xtask (deleted)".into()), Path::new("/nowhere/xtask"));
        assert_eq!(standing("/nowhere/xtask".into()), Path::new("/nowhere/xtask"));
        assert!(program().is_ok_and(|program| program.is_file()));
    }
}
