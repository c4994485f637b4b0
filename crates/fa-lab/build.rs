//! Tells the program which commit it was built from, for records of measurements. Those are made by release
//! builds: a development build is `development`, whatever it was built from, so that a commit does not make
//! cargo build this crate and all above it again.

use std::process::Command;

fn git(args: &[&str]) -> Option<String> {
    let done = Command::new("git").args(args).output().ok()?;
    done.status.success().then(|| String::from_utf8_lossy(&done.stdout).trim().to_owned())
}

/// Whether git tracks this file: a package that lies in another project's repository has no commit of its
/// own.
fn is_tracked() -> bool {
    git(&["ls-files", "--error-unmatch", "build.rs"]).is_some()
}

/// What decides whether a result is right: oracle, tolerances, cases and their inputs.
const JUDGE: [&str; 12] = [
    "../fa-cpu/src/compare",
    "../fa-cpu/src/compare.rs",
    "../fa-cpu/src/reference",
    "src/append.rs",
    "src/codes.rs",
    "src/grid",
    "src/judge",
    "src/memory.rs",
    "src/mods.rs",
    "src/random.rs",
    "src/sequences",
    "src/tensors.rs",
];

/// FNV-1a of the files at `path`, in the order of their names.
fn hash(path: &std::path::Path, so_far: u64) -> u64 {
    let fold = |so_far: u64, bytes: &[u8]| {
        bytes.iter().fold(so_far, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
    };
    if let Ok(entries) = std::fs::read_dir(path) {
        let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        return paths.iter().fold(so_far, |so_far, path| hash(path, so_far));
    }
    fold(so_far, &std::fs::read(path).unwrap_or_default())
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let mut judge = 0xcbf2_9ce4_8422_2325;
    for path in JUDGE {
        println!("cargo::rerun-if-changed={path}");
        judge = hash(std::path::Path::new(path), judge);
    }
    println!("cargo::rustc-env=FA_JUDGE={judge:016x}");
    if std::env::var("PROFILE").is_ok_and(|profile| profile == "debug") {
        println!("cargo::rustc-env=FA_COMMIT=development");
        return;
    }
    let commit = is_tracked().then(|| git(&["rev-parse", "HEAD"])).flatten();
    println!("cargo::rustc-env=FA_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
    if commit.is_none() {
        return;
    }
    // The reflog grows with every commit and checkout; without one there is nothing to watch.
    if let Some(log) = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"])
        && std::path::Path::new(&log).exists()
    {
        println!("cargo::rerun-if-changed={log}");
    }
}
