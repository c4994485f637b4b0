//! Tests that have passed on these very sources: they are not run again. A fresh clone knows those of the
//! committed list, of which it runs some all the same, others each day.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::SystemTime;

use fa_emu::Emulator;
use fa_kernels::atomic_file;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::emulator;

/// Runs every test, and writes the committed list.
const RECORD: &str = "FA_EMU_RECORD";

/// Of what a test tries, only that whose name contains this: it says nothing of the test as a whole.
pub(crate) const ONLY: &str = "FA_EMU_ONLY";

const COMMITTED: &str = "docs/results/emulation-tests.ron";

/// All that what these tests find depends on: the machine, the kernels, who launches them, the oracle.
const SOURCES: [&str; 11] = [
    "crates/fa-core/src",
    "crates/fa-cpu/src",
    "crates/fa-planner/src",
    "crates/fa-kernels/cuda",
    "crates/fa-kernels/specs",
    "crates/fa-kernels/src",
    "crates/fa-lab/src/grid.rs",
    "crates/fa-lab/src/grid",
    "crates/fa-lab/src/sequences.rs",
    "crates/fa-lab/src/sequences",
    "crates/fa-emu",
];

/// What of those it does not depend on: what describes kernels and plans to a reader.
const APART: [&str; 4] = [
    "crates/fa-planner/src/guide",
    "crates/fa-planner/src/report",
    "crates/fa-planner/src/timeline",
    "crates/fa-emu/src/timeline.rs",
];

/// Of the committed list's tests, every so manieth runs on a day.
const TURNS: u64 = 5;

/// Tests that have passed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Known {
    /// [`key`] of the sources that they have passed on.
    sources: String,
    /// Their names.
    passed: BTreeSet<String>,
}

impl Known {
    /// Those of a file that have passed on these sources.
    fn read(path: &Path) -> Known {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let known: Known = ron::from_str(&text).unwrap_or_default();
        if known.sources == *key() {
            known
        } else {
            Known { sources: key().clone(), passed: BTreeSet::new() }
        }
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn stamps() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulation-tests.ron")
}

fn is_set(variable: &str) -> bool {
    std::env::var_os(variable).is_some()
}

/// A hash of the sources without lines that are comments.
fn key() -> &'static String {
    static KEY: OnceLock<String> = OnceLock::new();
    KEY.get_or_init(|| {
        let mut texts = BTreeMap::new();
        for folder in SOURCES {
            gather(&root(), Path::new(folder), &mut texts);
        }
        let mut hasher = Sha256::new();
        for (path, text) in &texts {
            hasher.update(format!("{path} {}\n", text.len()));
            hasher.update(text);
        }
        hasher.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
    })
}

/// The code of a file, or of all files in a folder, by their paths from `root`.
fn gather(root: &Path, path: &Path, texts: &mut BTreeMap<String, String>) {
    let name = path.to_str().expect("names are ASCII").replace('\\', "/");
    let place = root.join(path);
    if APART.contains(&name.as_str()) {
        return;
    }
    if place.is_dir() {
        for entry in std::fs::read_dir(&place).unwrap_or_else(|error| panic!("{name}: {error}")) {
            gather(root, &path.join(entry.expect("it can be read").file_name()), texts);
        }
    } else if let Ok(text) = std::fs::read_to_string(&place) {
        let code = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"));
        texts.insert(name, code.collect::<Vec<_>>().join("\n"));
    }
}

/// Whether a test of the committed list runs today all the same.
fn is_drawn(test: &str) -> bool {
    let day = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |own| own.as_secs() / 86400);
    let place: u64 = test.bytes().map(u64::from).sum();
    (day + place).is_multiple_of(TURNS)
}

/// The emulator for a test that runs; it has passed once this is dropped.
pub(crate) struct Running {
    test: String,
    emulator: &'static Emulator,
}

impl Deref for Running {
    type Target = Emulator;

    fn deref(&self) -> &Emulator {
        self.emulator
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if std::thread::panicking() || is_set(ONLY) {
            return;
        }
        static ONE_WRITER: Mutex<()> = Mutex::new(());
        let _one = ONE_WRITER.lock().unwrap_or_else(PoisonError::into_inner);
        let mut files = vec![stamps()];
        if is_set(RECORD) {
            files.push(root().join(COMMITTED));
        }
        for file in files {
            let mut known = Known::read(&file);
            known.passed.insert(self.test.clone());
            let text = ron::ser::to_string_pretty(&known, ron::ser::PrettyConfig::new()).expect("plain data");
            atomic_file::write(&file, (text + "\n").as_bytes()).expect("the target folder can be written");
        }
    }
}

/// The emulator, unless `test` has passed on these sources, or there is no C++ compiler; both are said.
pub(crate) fn unless_known(test: &str) -> Option<Running> {
    let here = Known::read(&stamps()).passed.contains(test);
    let committed = || !is_drawn(test) && Known::read(&root().join(COMMITTED)).passed.contains(test);
    if !is_set(RECORD) && !is_set(ONLY) && (here || committed()) {
        // Past the test's capture: it explains the time that the suite takes.
        let _ = writeln!(std::io::stderr(), "{test}: has passed on these sources ({RECORD}=1 runs it)");
        return None;
    }
    Some(Running { test: test.to_owned(), emulator: emulator(test)? })
}

#[test]
fn sources_are_there_and_comments_do_not_count() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("known");
    let read = |text: &str| {
        std::fs::create_dir_all(folder.join("a/b")).unwrap();
        std::fs::write(folder.join("a/b/c.rs"), text).unwrap();
        let mut texts = BTreeMap::new();
        gather(&folder, Path::new("a"), &mut texts);
        texts
    };
    let first = read("fn a() {}\n");
    assert_eq!(first.keys().collect::<Vec<_>>(), ["a/b/c.rs"]);
    assert_eq!(first, read("// What it does.\n\n    fn a() {}\n"));
    assert_ne!(first, read("fn a() { b() }\n"));
    let mut texts = BTreeMap::new();
    for folder in SOURCES {
        let before = texts.len();
        gather(&root(), Path::new(folder), &mut texts);
        assert!(texts.len() > before, "{folder}");
    }
    assert!(
        APART.iter().all(|own| root().join(own).exists() && !texts.keys().any(|name| name.starts_with(own)))
    );
}
