//! What `cargo package` would publish holds all that the libraries embed.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::process::Command;

use fa_kernels::specs;
use serde_json::Value;

/// The files that the package in `folder` would hold.
fn packaged(folder: &Path) -> HashSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["package", "--list", "--allow-dirty", "--offline"])
        .current_dir(folder)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().replace('\\', "/").lines().map(str::to_owned).collect()
}

#[test]
fn the_package_holds_the_shipped_specs_the_headers_and_the_tuned_tables() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let specs = specs::shipped().unwrap_or_else(|(path, error)| panic!("specs/{path}: {error}"));
    assert!(!specs.is_empty());
    let mut wanted: Vec<String> = specs.iter().map(|file| format!("specs/{}", file.path)).collect();
    wanted.extend(["build.rs", "cuda/params.cuh", "cuda/sm90/fwd.cuh"].map(str::to_owned));
    // The table of tuned kernels is the facade's.
    let facade = vec!["tuned/h100.json".to_owned()];
    for (folder, wanted) in [(root.to_owned(), wanted), (root.join("../fa-attn"), facade)] {
        let listed = packaged(&folder);
        let missing: Vec<&String> = wanted.iter().filter(|file| !listed.contains(*file)).collect();
        assert!(missing.is_empty(), "cargo package in {} leaves out {missing:?}", folder.display());
    }
}

/// Runs a program in a folder and panics with what it said if it fails.
fn run(program: &str, arguments: &[&str], folder: &Path) {
    let output = Command::new(program).args(arguments).current_dir(folder).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
}

/// What the third-party crates below fa-kernels are in the workspace: dependencies for a manifest that give
/// each the features that it has there, so that what was compiled for the workspace serves. The crates that
/// its own packages name are left out: they have the features that those ask for.
fn as_in_the_workspace(root: &Path) -> String {
    let arguments = ["metadata", "--offline", "--format-version", "1", "--filter-platform", &host()];
    let output = Command::new(env!("CARGO")).args(arguments).current_dir(root).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let by_id = |list: &'static str| {
        let list = found.pointer(list).and_then(Value::as_array).unwrap();
        list.iter().map(|one| (one["id"].as_str().unwrap(), one)).collect::<HashMap<&str, &Value>>()
    };
    let (packages, nodes) = (by_id("/packages"), by_id("/resolve/nodes"));
    let own = |id: &str| packages[id]["source"].is_null();
    let first = packages.keys().copied().find(|id| packages[id]["name"] == "fa-kernels").unwrap();
    // Whether each is compiled for the host, as proc-macros are, and whether a package of ours names it.
    let (mut waiting, mut seen) = (vec![(first, false)], BTreeMap::from([((first, false), true)]));
    while let Some((id, on_host)) = waiting.pop() {
        for dependency in nodes[id]["deps"].as_array().unwrap() {
            let kinds = || dependency["dep_kinds"].as_array().unwrap().iter().map(|kind| &kind["kind"]);
            let to = packages.keys().copied().find(|to| dependency["pkg"] == **to).unwrap();
            let targets = packages[to]["targets"].as_array().unwrap();
            let is_macro = targets.iter().any(|target| target["kind"][0] == "proc-macro");
            let on_host = on_host || is_macro || !kinds().any(Value::is_null);
            if kinds().any(|kind| kind != "dev") {
                let news = !seen.contains_key(&(to, on_host));
                *seen.entry((to, on_host)).or_default() |= own(id);
                waiting.extend(news.then_some((to, on_host)));
            }
        }
    }
    let mut manifest = String::new();
    for ((id, on_host), _) in seen.iter().filter(|(_, named)| !**named) {
        let table = if *on_host { "build-dependencies" } else { "dependencies" };
        let [name, version] = ["name", "version"].map(|field| packages[id][field].as_str().unwrap());
        let features = &nodes[id]["features"];
        manifest += &format!(
            "\n[{table}.{name}-{}]\npackage = \"{name}\"\nversion = \"={version}\"\n\
             default-features = false\nfeatures = {features}\n",
            version.replace(['.', '+'], "-"),
        );
    }
    manifest
}

/// The target that tests are compiled for, as rustc calls it.
fn host() -> String {
    let output = Command::new("rustc").arg("-vV").output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    said.lines().find_map(|line| line.strip_prefix("host: ")).expect("rustc names its host").to_owned()
}

#[test]
fn the_crate_builds_from_its_package_alone() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    // A folder that stays: third-party crates that have been checked are not checked again.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("packages");
    let unpacked = folder.join("package");
    let _ = std::fs::remove_dir_all(&unpacked);
    std::fs::create_dir_all(&folder).unwrap();
    let crates = ["fa-core", "fa-planner", "fa-cpu", "fa-kernels"];
    let mut arguments = vec![
        "package",
        "--no-verify",
        "--allow-dirty",
        "--offline",
        "--target-dir",
        folder.to_str().unwrap(),
    ];
    crates.iter().for_each(|name| arguments.extend(["-p", name]));
    run(env!("CARGO"), &arguments, &root);
    let version = env!("CARGO_PKG_VERSION");
    for name in crates {
        // With the time of now: the packages' own, always the same, would let Cargo take old code for this.
        run("tar", &["xzmf", &format!("{name}-{version}.crate")], &unpacked);
    }
    // Other crates as the workspace has them; its own from their packages, checked as it checks them.
    let alone = unpacked.join(format!("fa-kernels-{version}"));
    let mut manifest = std::fs::read_to_string(alone.join("Cargo.toml")).unwrap();
    manifest += &as_in_the_workspace(&root);
    manifest += "\n[workspace]\n\n[patch.crates-io]\n";
    for name in &crates[..3] {
        manifest += &format!("{name} = {{ path = \"../{name}-{version}\" }}\n");
    }
    let workspace = std::fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let profiles = workspace.find("[profile.dev]").zip(workspace.find("[profile.release]"));
    let (begin, end) = profiles.expect("the workspace has profiles");
    manifest += &workspace[begin..end];
    std::fs::write(alone.join("Cargo.toml"), manifest).unwrap();
    std::fs::copy(root.join("Cargo.lock"), alone.join("Cargo.lock")).unwrap();
    let target = root.join("target");
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or(target, |own| root.join(own));
    run(env!("CARGO"), &["check", "-q", "--offline", "--target-dir", target.to_str().unwrap()], &alone);
}

#[test]
fn published_crates_say_what_they_are() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read =
        |path: &Path| std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let workspace = read(&root.join("Cargo.toml"));
    for field in ["license = ", "readme = ", "keywords = ", "categories = ", "rust-version = "] {
        assert!(workspace.contains(field), "the workspace's Cargo.toml has no {field}");
    }
    for name in [
        "fa-core",
        "fa-planner",
        "fa-kernels",
        "fa-cpu",
        "fa-attn",
        "fa-dist",
        "fa-emu",
        "fa-lab",
        "fa-cli",
        "fa-candle",
    ] {
        let manifest = read(&root.join(format!("crates/{name}/Cargo.toml")));
        let own = [
            "description = \"",
            "license.workspace",
            "readme.workspace",
            "keywords.workspace",
            "categories.",
        ];
        for field in own {
            assert!(manifest.contains(field), "{name}: no {field}");
        }
        // No public address of the sources is known: a crate without `repository` is valid, one with a wrong
        // address misleads. Once there is one it stands in the workspace's Cargo.toml for all.
        let known = workspace.contains("repository = ");
        assert_eq!(manifest.contains("repository"), known, "{name}: repository");
    }
}
