//! Packages whose tests have passed on these very files: `cargo xtask ci` does not run them again, and counts
//! their tests as skipped.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::workspace;

/// Variables that tests read begin so.
const VARIABLES: [&str; 4] = ["FA_", "PROPTEST_", "RUST_", "CXX"];

/// The packages by name, with a hash of what their tests depend on; and those that passed.
pub(crate) struct Passed {
    file: PathBuf,
    inputs: BTreeMap<String, u64>,
    passed: BTreeMap<String, u64>,
}

/// A package by its folder, and the folders of those in the workspace that it or its tests use.
type Uses = BTreeMap<PathBuf, BTreeSet<PathBuf>>;

impl Passed {
    /// Those of earlier runs; none with `again`, and in a tree without git.
    pub(crate) fn read(again: bool) -> Result<Passed> {
        let file = workspace::target_dir().join("passed.ron");
        let passed = std::fs::read_to_string(&file).ok().and_then(|text| ron::from_str(&text).ok());
        let (uses, names) = packages()?;
        let inputs = match tracked(workspace::root()) {
            Some(files) => inputs(workspace::root(), &files, &uses, &variables()),
            None => uses.keys().map(|folder| (folder.clone(), 0)).collect(),
        };
        let named = |(folder, hash)| (names[&folder].clone(), hash);
        let passed = passed.filter(|_| !again).unwrap_or_default();
        Ok(Passed { file, inputs: inputs.into_iter().map(named).collect(), passed })
    }

    /// The packages whose tests have not passed on these files.
    pub(crate) fn left(&self) -> Vec<&str> {
        let is_left = |(name, hash): &(&String, &u64)| **hash == 0 || self.passed.get(*name) != Some(*hash);
        self.inputs.iter().filter(is_left).map(|(name, _)| name.as_str()).collect()
    }

    /// Keeps that all packages have passed.
    pub(crate) fn keep(&self) -> Result<()> {
        let text = ron::ser::to_string_pretty(&self.inputs, ron::ser::PrettyConfig::new())?;
        std::fs::write(&self.file, text).with_context(|| format!("{} cannot be written", self.file.display()))
    }
}

/// The files below `root` that git does not ignore, by their paths from it.
fn tracked(root: &Path) -> Option<Vec<String>> {
    let arguments = ["ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"];
    let output = std::process::Command::new("git").args(arguments).current_dir(root).output().ok()?;
    let names = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
    let names: Vec<String> = names.split_terminator('\0').map(str::to_owned).collect();
    (!names.is_empty()).then_some(names)
}

/// The variables that tests read.
fn variables() -> String {
    let mut variables: Vec<(String, String)> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, format!("{value:?}"))))
        .filter(|(name, _)| VARIABLES.iter().any(|begin| name.starts_with(begin)))
        .collect();
    variables.sort();
    format!("{variables:?}")
}

/// The workspace's packages and what they use, as cargo says, and their names.
fn packages() -> Result<(Uses, BTreeMap<PathBuf, String>)> {
    let packages = workspace::packages(["--no-deps", "--offline"])?;
    let names = packages.iter().filter_map(|package| {
        let folder = Path::new(package["manifest_path"].as_str()?).parent()?.to_owned();
        Some((folder, package["name"].as_str()?.to_owned()))
    });
    let direct: Uses = packages
        .iter()
        .filter_map(|package| {
            let folder = Path::new(package["manifest_path"].as_str()?).parent()?.to_owned();
            let used = package["dependencies"].as_array()?.iter();
            Some((folder, used.filter_map(|own| own["path"].as_str()).map(PathBuf::from).collect()))
        })
        .collect();
    let uses = direct.keys().map(|folder| (folder.clone(), reached(folder, &direct))).collect();
    Ok((uses, names.collect()))
}

/// `folder` and all that it uses by way of others.
fn reached(folder: &Path, direct: &Uses) -> BTreeSet<PathBuf> {
    let (mut found, mut waiting) = (BTreeSet::new(), vec![folder.to_owned()]);
    while let Some(next) = waiting.pop() {
        if found.insert(next.clone()) {
            waiting.extend(direct.get(&next).into_iter().flatten().cloned());
        }
    }
    found
}

/// For each package a hash of the Rust sources of the crates that it uses, and of all other files: tests read
/// records, examples, kernels and manifests anywhere. Of `xtask`, whose tests read everything, also of
/// all Rust sources; and xtask's own count for all, since it runs them.
fn inputs(root: &Path, files: &[String], uses: &Uses, variables: &str) -> BTreeMap<PathBuf, u64> {
    let xtask = root.join("xtask");
    // The hash of a file, and the package whose Rust source it is.
    let hashed: Vec<(Option<&PathBuf>, u64)> = files
        .iter()
        .map(|name| {
            let path = root.join(name);
            let mut hasher = DefaultHasher::new();
            // A file that was removed but not committed is none.
            (name, std::fs::read(&path).ok()).hash(&mut hasher);
            let of = uses.keys().find(|folder| path.starts_with(folder) && **folder != xtask);
            (of.filter(|_| name.ends_with(".rs")), hasher.finish())
        })
        .collect();
    let of = |folder: &Path, used: &BTreeSet<PathBuf>| {
        let mut hasher = DefaultHasher::new();
        variables.hash(&mut hasher);
        let counts = |of: Option<&PathBuf>| folder == xtask || of.is_none_or(|of| used.contains(of));
        hashed.iter().filter(|(of, _)| counts(*of)).for_each(|(_, file)| file.hash(&mut hasher));
        hasher.finish()
    };
    uses.iter().map(|(folder, used)| (folder.clone(), of(folder, used))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Those of a tree's packages whose inputs differ once `change` is made.
    fn changed(change: impl FnOnce(&Path), variables: &str) -> Vec<String> {
        let own = tempfile::tempdir().unwrap();
        let root = own.path();
        let files = ["core/a.rs", "core/tests/a.rs", "core/x.cuh", "lab/b.rs", "xtask/c.rs", "docs/d.ron"];
        for name in files {
            let path = root.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, name).unwrap();
        }
        let direct = Uses::from([
            (root.join("core"), BTreeSet::new()),
            (root.join("lab"), BTreeSet::from([root.join("core")])),
            (root.join("cli"), BTreeSet::from([root.join("lab")])),
            (root.join("xtask"), BTreeSet::new()),
        ]);
        let uses: Uses = direct.keys().map(|own| (own.clone(), reached(own, &direct))).collect();
        let names = files.map(str::to_owned);
        let before = inputs(root, &names, &uses, "one");
        change(root);
        let after = inputs(root, &names, &uses, variables);
        let differ = after.iter().filter(|(folder, own)| before[*folder] != **own);
        differ.map(|(folder, _)| folder.file_name().unwrap().to_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn rust_sources_count_where_they_are_used_and_other_files_everywhere() {
        let write = |name: &'static str| move |root: &Path| std::fs::write(root.join(name), "new").unwrap();
        assert_eq!(changed(|_| (), "one"), [""; 0]);
        assert_eq!(changed(write("core/tests/a.rs"), "one"), ["cli", "core", "lab", "xtask"]);
        assert_eq!(changed(write("lab/b.rs"), "one"), ["cli", "lab", "xtask"]);
        let all = ["cli", "core", "lab", "xtask"];
        for other in ["core/x.cuh", "docs/d.ron", "xtask/c.rs"] {
            assert_eq!(changed(write(other), "one"), all, "{other}");
        }
        assert_eq!(changed(|root| std::fs::remove_file(root.join("docs/d.ron")).unwrap(), "one"), all);
        assert_eq!(changed(|_| (), "two"), all);
    }

    #[test]
    fn packages_use_what_cargo_says() {
        let uses = packages().unwrap().0;
        let at = |name: &str| workspace::root().join("crates").join(name);
        let of_kernels = &uses[&at("fa-kernels")];
        // fa-cpu is for its tests alone; fa-planner uses fa-core.
        for name in ["fa-core", "fa-planner", "fa-cpu", "fa-kernels"] {
            assert!(of_kernels.contains(&at(name)), "{name}");
        }
        assert!(!of_kernels.contains(&at("fa-cli")) && uses[&at("fa-cli")].contains(&at("fa-core")));
    }

    #[test]
    fn a_package_is_left_until_it_has_passed_on_these_files() {
        let own = tempfile::tempdir().unwrap();
        let file = own.path().join("passed.ron");
        let read = |a: u64| {
            let text = std::fs::read_to_string(&file).unwrap_or_else(|_| "{}".to_owned());
            let inputs = BTreeMap::from([("a".to_owned(), a), ("b".to_owned(), 7)]);
            Passed { file: file.clone(), inputs, passed: ron::from_str(&text).unwrap() }
        };
        assert_eq!(read(1).left(), ["a", "b"]);
        read(1).keep().unwrap();
        assert_eq!(read(1).left(), [""; 0]);
        assert_eq!(read(2).left(), ["a"]);
        // Without a hash nothing is known.
        assert_eq!(read(0).left(), ["a"]);
    }
}
