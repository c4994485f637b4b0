//! Test programs that have passed today on these very files: `cargo xtask ci` does not run them again.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::workspace;

/// Variables that tests read begin so.
const VARIABLES: [&str; 4] = ["FA_", "PROPTEST_", "RUST_", "CXX"];

/// The test programs that passed, and what they ran on.
pub(crate) struct Passed {
    file: PathBuf,
    /// For a folder with a package, the hash of what its tests depend on; none in a tree without git.
    inputs: BTreeMap<PathBuf, u64>,
    programs: BTreeMap<String, Entry>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Entry {
    inputs: u64,
    /// Its lines `test result: ..`.
    results: Vec<String>,
}

/// A package by its folder, and the folders of those in the workspace that it or its tests use.
type Uses = BTreeMap<PathBuf, BTreeSet<PathBuf>>;

impl Passed {
    /// Those of earlier runs today.
    pub(crate) fn read() -> Result<Passed> {
        let file = workspace::target_dir().join("passed.ron");
        let programs = std::fs::read_to_string(&file).ok().and_then(|text| ron::from_str(&text).ok());
        let files = tracked(workspace::root());
        let inputs = match files {
            Some(files) => inputs(workspace::root(), &files, &uses()?, &surroundings()),
            None => BTreeMap::new(),
        };
        Ok(Passed { file, inputs, programs: programs.unwrap_or_default() })
    }

    /// Lets every program run again.
    pub(crate) fn forget(&mut self) {
        self.programs.clear();
    }

    /// What a program of the package in `folder` depends on.
    fn key(&self, folder: &Path, program: &Path) -> Option<u64> {
        let mut hasher = DefaultHasher::new();
        self.inputs.get(folder)?.hash(&mut hasher);
        // Cargo has left the file alone if nothing that is compiled into it has changed.
        let file = program.metadata().ok()?;
        (program, file.len(), file.modified().ok()?).hash(&mut hasher);
        Some(hasher.finish())
    }

    /// The results of a program that has passed today on these files.
    pub(crate) fn results(&self, name: &str, folder: &Path, program: &Path) -> Option<&[String]> {
        let inputs = self.key(folder, program)?;
        let entry = self.programs.get(name).filter(|entry| entry.inputs == inputs)?;
        Some(&entry.results)
    }

    /// Keeps the results of a program that passed.
    pub(crate) fn keep(&mut self, name: &str, folder: &Path, program: &Path, text: &str) -> Result<()> {
        let Some(inputs) = self.key(folder, program) else { return Ok(()) };
        let results = text.lines().filter(|line| line.starts_with("test result:")).map(str::to_owned);
        self.programs.insert(name.to_owned(), Entry { inputs, results: results.collect() });
        let text = ron::ser::to_string_pretty(&self.programs, ron::ser::PrettyConfig::new())?;
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

/// What tests find besides files: the day, since some draw what they run, and variables.
fn surroundings() -> String {
    let day = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |own| own.as_secs() / 86400);
    let mut variables: Vec<(String, String)> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, format!("{value:?}"))))
        .filter(|(name, _)| VARIABLES.iter().any(|begin| name.starts_with(begin)))
        .collect();
    variables.sort();
    format!("{day} {variables:?}")
}

/// The workspace's packages and what they use, as cargo says.
fn uses() -> Result<Uses> {
    let packages = workspace::packages(["--no-deps", "--offline"])?;
    let direct: Uses = packages
        .iter()
        .filter_map(|package| {
            let folder = Path::new(package["manifest_path"].as_str()?).parent()?.to_owned();
            let used = package["dependencies"].as_array()?.iter();
            Some((folder, used.filter_map(|own| own["path"].as_str()).map(PathBuf::from).collect()))
        })
        .collect();
    Ok(direct.keys().map(|folder| (folder.clone(), reached(folder, &direct))).collect())
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
fn inputs(root: &Path, files: &[String], uses: &Uses, surroundings: &str) -> BTreeMap<PathBuf, u64> {
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
        surroundings.hash(&mut hasher);
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
    fn changed(change: impl FnOnce(&Path), surroundings: &str) -> Vec<String> {
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
        let before = inputs(root, &names, &uses, "today");
        change(root);
        let after = inputs(root, &names, &uses, surroundings);
        let differ = after.iter().filter(|(folder, own)| before[*folder] != **own);
        differ.map(|(folder, _)| folder.file_name().unwrap().to_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn rust_sources_count_where_they_are_used_and_other_files_everywhere() {
        let write = |name: &'static str| move |root: &Path| std::fs::write(root.join(name), "new").unwrap();
        assert_eq!(changed(|_| (), "today"), [""; 0]);
        assert_eq!(changed(write("core/tests/a.rs"), "today"), ["cli", "core", "lab", "xtask"]);
        assert_eq!(changed(write("lab/b.rs"), "today"), ["cli", "lab", "xtask"]);
        let all = ["cli", "core", "lab", "xtask"];
        for other in ["core/x.cuh", "docs/d.ron", "xtask/c.rs"] {
            assert_eq!(changed(write(other), "today"), all, "{other}");
        }
        assert_eq!(changed(|root| std::fs::remove_file(root.join("docs/d.ron")).unwrap(), "today"), all);
        assert_eq!(changed(|_| (), "tomorrow"), all);
    }

    #[test]
    fn packages_use_what_cargo_says() {
        let uses = uses().unwrap();
        let at = |name: &str| workspace::root().join("crates").join(name);
        let of_kernels = &uses[&at("fa-kernels")];
        // fa-cpu is for its tests alone; fa-planner uses fa-core.
        for name in ["fa-core", "fa-planner", "fa-cpu", "fa-kernels"] {
            assert!(of_kernels.contains(&at(name)), "{name}");
        }
        assert!(!of_kernels.contains(&at("fa-cli")) && uses[&at("fa-cli")].contains(&at("fa-core")));
    }

    #[test]
    fn a_program_is_spared_until_it_or_its_files_change() {
        let own = tempfile::tempdir().unwrap();
        let program = own.path().join("suite");
        std::fs::write(&program, "one").unwrap();
        let folder = own.path();
        let passed = |inputs: u64| {
            let file = own.path().join("passed.ron");
            let programs = std::fs::read_to_string(&file).map(|text| ron::from_str(&text).unwrap());
            let inputs = BTreeMap::from([(folder.to_owned(), inputs)]);
            Passed { file, inputs, programs: programs.unwrap_or_default() }
        };
        let result = "test result: ok. 3 passed; 0 failed; 0 ignored";
        assert_eq!(passed(1).results("a suite", folder, &program), None);
        passed(1).keep("a suite", folder, &program, &format!("running 3 tests\n{result}\n")).unwrap();
        assert_eq!(passed(1).results("a suite", folder, &program), Some(&[result.to_owned()][..]));
        assert_eq!(passed(1).results("a suite", Path::new("/elsewhere"), &program), None);
        assert_eq!(passed(1).results("b suite", folder, &program), None);
        assert_eq!(passed(2).results("a suite", folder, &program), None);
        std::fs::write(&program, "other").unwrap();
        assert_eq!(passed(1).results("a suite", folder, &program), None);
    }
}
