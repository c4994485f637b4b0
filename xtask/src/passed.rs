//! Packages whose tests have passed on these very files, and candle's and Python's sides likewise: `cargo
//! xtask ci` does not run them again, and counts their tests as skipped.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};

use crate::workspace;

/// Variables that tests read begin so.
const VARIABLES: [&str; 4] = ["FA_", "PROPTEST_", "RUST_", "CXX"];

/// Whose tests read which files that are no Rust sources, besides those of the package that they lie in and
/// its users; a test looks for their names. Pages beside Cargo.toml are read as docs/ is. Manifests count for
/// all, and so do files of no package that are not among these, as examples/.
const READERS: [(&str, &[&str]); 5] = [
    ("docs/", &["crates/fa-cli", "crates/fa-emu", "crates/fa-lab"]),
    ("python/", &["crates/fa-cli", "python"]),
    ("crates/fa-emu/", &["crates/fa-kernels", "crates/fa-lab"]),
    ("bench/", &[]),
    ("scripts/", &[]),
];

/// The files of xtask that run tests, which count for all packages.
const RUN_TESTS: [&str; 10] = [
    "xtask/src/main.rs",
    "xtask/src/ci.rs",
    "xtask/src/passed.rs",
    "xtask/src/runner.rs",
    "xtask/src/workspace.rs",
    "xtask/src/toolkit.rs",
    "xtask/src/device.rs",
    "xtask/src/candle.rs",
    "xtask/src/packages.rs",
    "xtask/src/python.rs",
];

/// A check that is no test of the workspace's packages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Check {
    /// Others' tests and models on fa-candle.
    Candle,
    /// The Python package's types and its tests.
    Python,
}

impl Check {
    /// Its name in the file, and the package that it depends on.
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Check::Candle => ("candle", "fa-candle-models"),
            Check::Python => ("python", "fa-python"),
        }
    }
}

/// The packages by name, with a hash of what their tests depend on; and what has passed.
pub(crate) struct Passed {
    file: PathBuf,
    inputs: BTreeMap<String, u64>,
    passed: Mutex<BTreeMap<String, u64>>,
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
        let passed = Mutex::new(passed.filter(|_| !again).unwrap_or_default());
        Ok(Passed { file, inputs: inputs.into_iter().map(named).collect(), passed })
    }

    /// Whether `name` has not passed on the files that `package` depends on.
    fn is_left(&self, name: &str, package: &str) -> bool {
        let hash = self.inputs.get(package).copied().unwrap_or_default();
        let passed = self.passed.lock().unwrap_or_else(PoisonError::into_inner);
        hash == 0 || passed.get(name) != Some(&hash)
    }

    /// The packages whose tests have not passed on these files.
    pub(crate) fn left(&self) -> Vec<&str> {
        self.inputs.keys().map(String::as_str).filter(|name| self.is_left(name, name)).collect()
    }

    /// Runs a check unless it has passed on these files, and keeps that it has.
    pub(crate) fn check(&self, check: Check, run: impl FnOnce() -> Result<()>) -> Result<()> {
        let (name, package) = check.names();
        if !self.is_left(name, package) {
            println!("{name}: passed on these files");
            return Ok(());
        }
        run()?;
        self.keep(&[(name, package)])
    }

    /// Keeps that all packages have passed.
    pub(crate) fn keep_packages(&self) -> Result<()> {
        self.keep(&self.inputs.keys().map(|name| (name.as_str(), name.as_str())).collect::<Vec<_>>())
    }

    /// Keeps that these have passed on what the packages beside them depend on.
    fn keep(&self, names: &[(&str, &str)]) -> Result<()> {
        let mut passed = self.passed.lock().unwrap_or_else(PoisonError::into_inner);
        passed.extend(names.iter().map(|(name, package)| ((*name).to_owned(), self.inputs[*package])));
        let text = ron::ser::to_string_pretty(&*passed, ron::ser::PrettyConfig::new())?;
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

/// What has to be tested again when a file changes.
enum Of<'a> {
    /// The package in this folder, if any, in which it lies, those that use it, and those that read it.
    Users(Option<&'a Path>, &'static [&'static str]),
    /// All packages.
    All,
}

impl<'a> Of<'a> {
    fn file(root: &Path, name: &str, uses: &'a Uses) -> Of<'a> {
        if RUN_TESTS.contains(&name) || name.ends_with("Cargo.toml") {
            return Of::All;
        }
        let own =
            uses.keys().filter(|folder| root.join(name).starts_with(folder)).max().map(PathBuf::as_path);
        let is_page = !name.contains('/') && name.ends_with(".md");
        let read = READERS.iter().find(|(begin, _)| name.starts_with(begin) || is_page && *begin == "docs/");
        match (own, read) {
            (own, _) if name.ends_with(".rs") => own.map_or(Of::All, |own| Of::Users(Some(own), &[])),
            (own, Some((_, readers))) => Of::Users(own, readers),
            (Some(own), None) => Of::Users(Some(own), &[]),
            (None, None) => Of::All,
        }
    }

    /// Whether it counts for the package in `folder`, which uses those in `used`.
    fn counts(&self, root: &Path, folder: &Path, used: &BTreeSet<PathBuf>) -> bool {
        match self {
            Of::Users(own, readers) => {
                own.is_some_and(|own| used.contains(own))
                    || readers.iter().any(|reader| root.join(reader) == folder)
            }
            Of::All => true,
        }
    }
}

/// For each package a hash of the Rust sources of the crates that it uses, and of the other files that its
/// tests may read; of `xtask`, whose tests read everything, of all files.
fn inputs(root: &Path, files: &[String], uses: &Uses, variables: &str) -> BTreeMap<PathBuf, u64> {
    let hashed: Vec<(Of<'_>, u64)> = files
        .iter()
        .map(|name| {
            let mut hasher = DefaultHasher::new();
            // A file that was removed but not committed is none.
            (name, std::fs::read(root.join(name)).ok()).hash(&mut hasher);
            (Of::file(root, name, uses), hasher.finish())
        })
        .collect();
    let of = |folder: &Path, used: &BTreeSet<PathBuf>| {
        let mut hasher = DefaultHasher::new();
        variables.hash(&mut hasher);
        let counts = |of: &Of<'_>| folder.ends_with("xtask") || of.counts(root, folder, used);
        hashed.iter().filter(|(of, _)| counts(of)).for_each(|(_, file)| file.hash(&mut hasher));
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
        let files = [
            "core/a.rs",
            "core/tests/a.rs",
            "core/x.cuh",
            "core/Cargo.toml",
            "lab/b.rs",
            "lab/x.cpp",
            "bench/x.py",
            "xtask/c.rs",
            "xtask/src/ci.rs",
            "docs/d.ron",
            "README.md",
            "python/e.py",
            "python/e.rs",
            "specs/f.ron",
        ];
        for name in files {
            let path = root.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, name).unwrap();
        }
        let direct = Uses::from([
            (root.join("core"), BTreeSet::new()),
            (root.join("lab"), BTreeSet::from([root.join("core")])),
            (root.join("crates/fa-cli"), BTreeSet::from([root.join("lab")])),
            (root.join("python"), BTreeSet::from([root.join("core")])),
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
    fn files_count_where_they_are_used_or_read() {
        let write = |name: &'static str| move |root: &Path| std::fs::write(root.join(name), "new").unwrap();
        assert_eq!(changed(|_| (), "one"), [""; 0]);
        let all = ["core", "fa-cli", "lab", "python", "xtask"];
        let cases = [
            ("core/tests/a.rs", &all[..]),
            ("lab/b.rs", &["fa-cli", "lab", "xtask"]),
            ("python/e.rs", &["python", "xtask"]),
            ("python/e.py", &["fa-cli", "python", "xtask"]),
            ("docs/d.ron", &["fa-cli", "xtask"]),
            ("README.md", &["fa-cli", "xtask"]),
            ("core/x.cuh", &all),
            ("core/Cargo.toml", &all),
            ("lab/x.cpp", &["fa-cli", "lab", "xtask"]),
            ("bench/x.py", &["xtask"]),
            ("specs/f.ron", &all),
            ("xtask/c.rs", &["xtask"]),
            ("xtask/src/ci.rs", &all),
        ];
        for (file, wanted) in cases {
            let mut found = changed(write(file), "one");
            found.sort();
            assert_eq!(found, wanted, "{file}");
        }
        assert_eq!(changed(|root| std::fs::remove_file(root.join("specs/f.ron")).unwrap(), "one").len(), 5);
        assert_eq!(changed(|_| (), "two").len(), 5);
    }

    /// [`READERS`] names all whose code, but for comments, names files of no package or of one that they do
    /// not use.
    #[test]
    fn readers_are_all_who_name_such_files() {
        let (root, uses) = (workspace::root(), packages().unwrap().0);
        let sources = workspace::sources(root, "rs");
        let packages = uses.keys().map(|own| own.strip_prefix(root).unwrap().to_str().unwrap().to_owned());
        let folders: BTreeSet<String> =
            packages.chain(READERS.map(|(folder, _)| folder.trim_end_matches('/').to_owned())).collect();
        for folder in folders.iter().filter(|folder| *folder != "xtask") {
            let readers = READERS.iter().find(|(own, _)| own.trim_end_matches('/') == folder);
            let readers = readers.map_or(&[][..], |(_, readers)| readers);
            let beside = folder.trim_start_matches("crates/");
            let mut named = vec![format!("\"{folder}/"), format!("../{beside}/")];
            named.extend(folder.starts_with("crates/").then(|| format!("\"{folder}\"")));
            for (name, text) in sources.iter().filter(|(name, _)| !name.starts_with("xtask/")) {
                let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
                let reader = uses.keys().filter(|own| root.join(name).starts_with(own)).max();
                let Some(reader) = reader.filter(|own| !uses[*own].contains(&root.join(folder))) else {
                    continue;
                };
                let is_known = readers.iter().any(|own| root.join(own) == *reader);
                let reads = code.clone().any(|line| named.iter().any(|path| line.contains(path)));
                assert!(is_known || !reads, "{name} reads {folder}: name its package in READERS");
            }
        }
    }

    /// [`RUN_TESTS`] names all that `cargo xtask ci` is made of.
    #[test]
    fn files_that_run_tests_are_all_that_they_import() {
        let imports = |text: &str| -> Vec<String> {
            let lines = text.lines().filter_map(|line| line.strip_prefix("use crate::")).map(str::to_owned);
            let names = lines.flat_map(|line| {
                let names = line.trim_matches(|c| "{};".contains(c)).split("::").next().unwrap().to_owned();
                names.split(", ").map(str::to_owned).collect::<Vec<_>>()
            });
            names.collect()
        };
        for file in RUN_TESTS.iter().filter(|file| !file.ends_with("main.rs")) {
            let text = std::fs::read_to_string(workspace::root().join(file)).unwrap();
            for module in imports(&text) {
                let path = format!("xtask/src/{module}.rs");
                assert!(RUN_TESTS.contains(&path.as_str()), "{file} uses {path}: name it in RUN_TESTS");
            }
        }
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
            let named = [("a", a), ("b", 7), ("fa-python", a)];
            let inputs = BTreeMap::from(named.map(|(name, hash)| (name.to_owned(), hash)));
            Passed { file: file.clone(), inputs, passed: Mutex::new(ron::from_str(&text).unwrap()) }
        };
        assert_eq!(read(1).left(), ["a", "b", "fa-python"]);
        read(1).keep_packages().unwrap();
        assert_eq!(read(1).left(), [""; 0]);
        assert_eq!(read(2).left(), ["a", "fa-python"]);
        // Without a hash nothing is known.
        assert_eq!(read(0).left(), ["a", "fa-python"]);
        // A check runs until it has passed on what its package depends on.
        let runs = |a: u64, passes: bool| {
            let mut runs = false;
            let checked = read(a).check(Check::Python, || {
                runs = true;
                if passes { Ok(()) } else { anyhow::bail!("wrong") }
            });
            assert_eq!(checked.is_ok(), passes || !runs);
            runs
        };
        assert!(runs(1, false) && runs(1, true));
        assert!(!runs(1, true) && runs(2, true) && runs(0, true));
        assert_eq!(read(1).left(), [""; 0]);
    }
}
