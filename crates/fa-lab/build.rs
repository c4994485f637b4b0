//! Tells the program which commit it was built from, for records of measurements. Those are made by release
//! builds: a development build is `development`, whatever it was built from, so that a commit does not make
//! cargo build this crate and all above it again.

use std::process::Command;

fn git(args: &[&str]) -> Option<String> {
    let done = Command::new("git").args(args).output().ok()?;
    done.status.success().then(|| String::from_utf8_lossy(&done.stdout).trim().to_owned())
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("PROFILE").is_ok_and(|profile| profile == "debug") {
        println!("cargo::rustc-env=FA_COMMIT=development");
        return;
    }
    let commit = git(&["rev-parse", "HEAD"]).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env=FA_COMMIT={commit}");
    // The reflog grows with every commit and checkout; without one there is nothing to watch.
    if let Some(log) = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"])
        && std::path::Path::new(&log).exists()
    {
        println!("cargo::rerun-if-changed={log}");
    }
}
