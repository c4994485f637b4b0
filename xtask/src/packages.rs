//! `cargo xtask package`: the crates as `cargo package` would publish them, built from their packages alone.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::workspace;

/// Write the package of every published crate and build each from its package alone, as `cargo publish` does
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Check that they compile, with the third-party crates that this workspace has checked: a step of `ci`
    #[arg(long)]
    quick: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.quick { check() } else { verify() }
}

/// What `cargo publish` would do but for the upload.
pub(crate) fn verify() -> Result<()> {
    let mut command = workspace::cargo_command(&["package", "--workspace", "--allow-dirty"]);
    for name in unpublished()? {
        command.args(["--exclude", &name]);
    }
    let status = command.status().context("cargo does not start")?;
    ensure!(status.success(), "cargo package failed ({status})");
    Ok(())
}

/// The workspace's packages that stay in it.
fn unpublished() -> Result<Vec<String>> {
    let own = workspace::packages(["--no-deps", "--offline"])?;
    Ok(own.iter().filter(|one| !is_published(one)).map(name).collect())
}

/// Whether `cargo metadata` names registries for this package: `publish = false` is an empty list.
fn is_published(package: &Value) -> bool {
    package["publish"].as_array().is_none_or(|to| !to.is_empty())
}

fn name(package: &Value) -> String {
    package["name"].as_str().unwrap_or_default().to_owned()
}

/// Third-party crates below those of `own`, as dependencies for a manifest that give each the features that
/// it has in the workspace, so that what was compiled for the workspace serves.
fn as_in_the_workspace(found: &Value, own: &[&str]) -> Result<String> {
    let by_id = |list: &'static str| {
        let list =
            found.pointer(list).and_then(Value::as_array).context("cargo metadata has no such list")?;
        let named = list.iter().filter_map(|one| Some((one["id"].as_str()?, one)));
        Ok::<_, anyhow::Error>(named.collect::<HashMap<&str, &Value>>())
    };
    let (packages, nodes) = (by_id("/packages")?, by_id("/resolve/nodes")?);
    let is_own = |id: &str| packages[id]["source"].is_null();
    // Whether each is compiled for the host, as proc-macros are, and whether a package of ours names it.
    let first = packages.keys().copied().filter(|id| own.contains(&name(packages[id]).as_str()));
    let mut waiting: Vec<(&str, bool)> = first.map(|id| (id, false)).collect();
    let mut seen: BTreeMap<(&str, bool), bool> = waiting.iter().map(|one| (*one, true)).collect();
    while let Some((id, on_host)) = waiting.pop() {
        for dependency in nodes[id]["deps"].as_array().into_iter().flatten() {
            let kinds = || dependency["dep_kinds"].as_array().into_iter().flatten().map(|kind| &kind["kind"]);
            let to =
                packages.keys().copied().find(|to| dependency["pkg"] == **to).context("no such package")?;
            let mut targets = packages[to]["targets"].as_array().into_iter().flatten();
            let is_macro = targets.any(|target| target["kind"][0] == "proc-macro");
            let on_host = on_host || is_macro || !kinds().any(Value::is_null);
            if kinds().any(|kind| kind != "dev") {
                let is_new = !seen.contains_key(&(to, on_host));
                *seen.entry((to, on_host)).or_default() |= is_own(id);
                waiting.extend(is_new.then_some((to, on_host)));
            }
        }
    }
    let mut manifest = String::new();
    for ((id, on_host), _) in seen.iter().filter(|((id, _), _)| !is_own(id)) {
        let table = if *on_host { "build-dependencies" } else { "dependencies" };
        let [name, version] =
            ["name", "version"].map(|field| packages[id][field].as_str().unwrap_or_default());
        let features = &nodes[id]["features"];
        manifest += &format!(
            "\n[{table}.{name}-{}]\npackage = \"{name}\"\nversion = \"={version}\"\n\
             default-features = false\nfeatures = {features}\n",
            version.replace(['.', '+'], "-"),
        );
    }
    Ok(manifest)
}

/// The target that this program was compiled for, as rustc calls it.
fn host() -> Result<String> {
    let output = Command::new("rustc").arg("-vV").output().context("rustc does not start")?;
    let said = String::from_utf8(output.stdout)?;
    Ok(said.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc names no host")?.to_owned())
}

/// Runs a program in a folder.
fn finish(program: &str, arguments: &[&str], folder: &Path) -> Result<()> {
    let output = Command::new(program).args(arguments).current_dir(folder).output();
    let output = output.with_context(|| format!("{program} does not start"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {arguments:?} in {}: {said}", folder.display());
    Ok(())
}

/// Checks that the published crates compile from their packages alone: a workspace of what the packages hold,
/// with the third-party crates, profiles and target folder of this one, of which only their own code is
/// compiled again. `cargo package` builds everything anew, once for each crate.
pub(crate) fn check() -> Result<()> {
    let root = workspace::root();
    let own = workspace::packages(["--no-deps", "--offline"])?;
    let published: Vec<String> = own.iter().filter(|one| is_published(one)).map(name).collect();
    // A folder that stays, so that cargo finds its results again.
    let folder = workspace::target_dir().join("packages");
    let unpacked = folder.join("package");
    if unpacked.exists() {
        std::fs::remove_dir_all(&unpacked)?;
    }
    std::fs::create_dir_all(&folder)?;
    let target = folder.to_str().context("the target folder's path is not UTF-8")?;
    let mut arguments = vec!["package", "--no-verify", "--allow-dirty", "--offline", "--target-dir", target];
    published.iter().for_each(|name| arguments.extend(["-p", name]));
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    finish(&cargo, &arguments, root)?;
    let version = env!("CARGO_PKG_VERSION");
    let packages: Vec<String> = published.iter().map(|name| format!("{name}-{version}")).collect();
    for package in &packages {
        // With the time of now: the packages' own, always the same, would let cargo take old code for this.
        finish("tar", &["xzmf", &format!("{package}.crate")], &unpacked)?;
    }
    let filter = ["--offline", "--filter-platform", &host()?];
    let mut metadata = workspace::cargo_command(&["metadata", "--quiet", "--format-version", "1"]);
    let output = metadata.args(filter).output().context("cargo does not start")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout)?;
    let names: Vec<&str> = published.iter().map(String::as_str).collect();
    let all = unpacked.join("third-party");
    std::fs::create_dir_all(all.join("src"))?;
    std::fs::write(all.join("src/lib.rs"), "")?;
    std::fs::write(
        all.join("Cargo.toml"),
        "[package]\nname = \"third-party\"\nversion = \"0.0.0\"\nedition = \"2024\"\nbuild = false\n"
            .to_owned()
            + &as_in_the_workspace(&found, &names)?,
    )?;
    let manifest = std::fs::read_to_string(root.join("Cargo.toml"))?;
    let profiles = manifest.find("[profile.dev]").zip(manifest.find("[profile.release]"));
    let (begin, end) = profiles.context("the workspace has no profiles")?;
    let members: Vec<&str> = packages.iter().map(String::as_str).chain(["third-party"]).collect();
    let mut whole = format!("[workspace]\nresolver = \"3\"\nmembers = {members:?}\n\n[patch.crates-io]\n");
    for (name, package) in published.iter().zip(&packages) {
        whole += &format!("{name} = {{ path = \"{package}\" }}\n");
    }
    std::fs::write(unpacked.join("Cargo.toml"), whole + "\n" + &manifest[begin..end])?;
    std::fs::copy(root.join("Cargo.lock"), unpacked.join("Cargo.lock"))?;
    let target = workspace::target_dir();
    let target = target.to_str().context("the target folder's path is not UTF-8")?;
    finish(&cargo, &["check", "--workspace", "--quiet", "--offline", "--target-dir", target], &unpacked)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// The files that the package in `folder` would hold.
    fn packaged(folder: &Path) -> HashSet<String> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(cargo)
            .args(["package", "--list", "--allow-dirty", "--offline"])
            .current_dir(folder)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().replace('\\', "/").lines().map(str::to_owned).collect()
    }

    /// What each published crate embeds, its own page and what a registry shows of it.
    #[test]
    fn packages_are_whole_and_say_what_they_are() {
        let own = workspace::packages(["--no-deps", "--offline"]).unwrap();
        let published: Vec<&Value> = own.iter().filter(|one| is_published(one)).collect();
        let embedded = |name: &str| match name {
            "fa-attn" => vec!["tuned/h100.json", "tuned/h200.json", "examples/train/text.txt"],
            "fa-kernels" => {
                vec!["build.rs", "cuda/params.cuh", "cuda/sm90/fwd.cuh", "specs/sm90/hd128-causal-bf16.ron"]
            }
            // Links to fa-attn's.
            "fa-dist" => {
                vec!["examples/train/model.rs", "examples/train/layers.rs", "examples/train/torch.txt"]
            }
            "fa-emu" => vec!["machine/tensor_memory.cpp", "host/ptx/tcgen05.cuh"],
            "fa-lab" => vec!["build.rs", "peers/peers.py", "peers/fa_peers/helper.py"],
            _ => vec![],
        };
        let names: HashSet<String> = published.iter().map(|one| name(one)).collect();
        for wanted in ["core", "planner", "cpu", "kernels", "attn", "candle", "dist", "emu", "lab", "cli"] {
            assert!(names.contains(&format!("fa-{wanted}")), "fa-{wanted} is not published: {names:?}");
        }
        let (mut pages, mut repositories) = (HashSet::new(), HashSet::new());
        for package in published {
            let name = name(package);
            let manifest = Path::new(package["manifest_path"].as_str().unwrap());
            let folder = manifest.parent().unwrap();
            for field in ["description", "license", "rust_version", "readme"] {
                assert!(package[field].is_string(), "{name}: no {field}");
            }
            for field in ["keywords", "categories"] {
                assert!(!package[field].as_array().unwrap().is_empty(), "{name}: no {field}");
            }
            // The sources' public address stands in every manifest or in none.
            repositories.insert(package["repository"].to_string());
            assert_eq!(package["readme"], "README.md", "{name}: the page is not its own");
            let page = std::fs::read_to_string(folder.join("README.md")).unwrap();
            assert!(page.starts_with(&format!("# {name}\n")), "{name}: README.md is of another crate");
            assert!(
                !page.contains("]("),
                "{name}: links of README.md lead nowhere outside of this repository"
            );
            assert!(pages.insert(page), "{name}: README.md is another crate's");
            let listed = packaged(folder);
            let wanted = [vec!["README.md", "Cargo.toml"], embedded(&name)].concat();
            let missing: Vec<&&str> = wanted.iter().filter(|file| !listed.contains(**file)).collect();
            assert!(missing.is_empty(), "cargo package leaves {missing:?} out of {name}");
        }
        assert_eq!(repositories.len(), 1, "{repositories:?}");
    }

    #[test]
    fn shipped_specs_are_all_in_the_package() {
        let kernels = workspace::root().join("crates/fa-kernels");
        let listed = packaged(&kernels);
        let specs = workspace::sources(&kernels.join("specs"), "ron");
        assert!(specs.len() > 50, "{}", specs.len());
        for (path, _) in specs {
            assert!(listed.contains(&format!("specs/{path}")), "specs/{path} is not in the package");
        }
    }
}
