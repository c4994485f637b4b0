//! `cargo xtask size`: the release program is under its limit.

use anyhow::{Result, ensure};

use crate::workspace;

/// Build the release program, whose profile strips it, and check that it is under 15 MB.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Bytes.
const LIMIT: u64 = 15_000_000;

pub(crate) fn run(_: &Args) -> Result<()> {
    workspace::cargo(&["build", "--quiet", "--release", "-p", "fa-cli"])?;
    let program = workspace::target_dir().join("release").join(format!("fa{}", std::env::consts::EXE_SUFFIX));
    let size = std::fs::metadata(&program)?.len();
    ensure!(size < LIMIT, "{} is {size} bytes, the limit is {LIMIT}", program.display());
    println!("{} is {size} bytes, under {LIMIT}", program.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `cargo install` installs is as small as what is measured here.
    #[test]
    fn the_release_profile_strips() {
        let manifest = std::fs::read_to_string(workspace::root().join("Cargo.toml")).expect("a manifest");
        let release = manifest.split("\n[").find_map(|table| table.strip_prefix("profile.release]\n"));
        let lines: Vec<&str> = release.expect("a release profile").lines().collect();
        assert!(lines.contains(&"strip = true"), "{lines:?}");
        assert!(!lines.iter().any(|line| line.starts_with("debug")), "{lines:?}");
    }
}
