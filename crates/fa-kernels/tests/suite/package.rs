//! What `cargo package` would publish holds all that the library embeds.

use std::collections::HashSet;
use std::process::Command;

use fa_kernels::specs;

#[test]
fn the_package_holds_the_shipped_specs_the_headers_and_the_tuned_tables() {
    let output = Command::new(env!("CARGO"))
        .args(["package", "--list", "--allow-dirty", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let listed = String::from_utf8(output.stdout).unwrap().replace('\\', "/");
    let listed: HashSet<&str> = listed.lines().collect();
    let specs = specs::shipped().unwrap_or_else(|(path, error)| panic!("specs/{path}: {error}"));
    assert!(!specs.is_empty());
    let mut wanted: Vec<String> = specs.iter().map(|file| format!("specs/{}", file.path)).collect();
    wanted.extend(["build.rs", "cuda/params.cuh", "cuda/sm90/fwd.cuh", "tuned/h100.ron"].map(str::to_owned));
    let missing: Vec<&String> = wanted.iter().filter(|file| !listed.contains(file.as_str())).collect();
    assert!(missing.is_empty(), "cargo package leaves out {missing:?}");
}
