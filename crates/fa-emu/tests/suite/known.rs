//! Tests that have passed on these very sources: they are not run again. A fresh clone knows those of the
//! committed list, of which it runs some all the same, others each day.

use std::collections::BTreeMap;
use std::io::Write;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Instant, SystemTime};

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

/// What of those it does not depend on: what describes kernels and plans to a reader, and the CPU code's unit
/// tests.
const APART: [&str; 6] = [
    "crates/fa-cpu/src/simd/tests.rs",
    "crates/fa-cpu/src/tiled/tests.rs",
    "crates/fa-planner/src/guide",
    "crates/fa-planner/src/report",
    "crates/fa-planner/src/timeline",
    "crates/fa-emu/src/timeline.rs",
];

/// Days on which every test of the committed list runs once: a week.
const TURNS: usize = 7;

/// Tests that have passed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Known {
    /// [`key`] of the sources that they have passed on.
    sources: String,
    /// The seconds that each took, by name.
    passed: BTreeMap<String, u32>,
}

impl Known {
    /// Those of a file that have passed on these sources.
    fn read(path: &Path) -> Known {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let known: Known = ron::from_str(&text).unwrap_or_default();
        if known.sources == *key() {
            known
        } else {
            Known { sources: key().clone(), passed: BTreeMap::new() }
        }
    }

    /// Whether a test is here and does not run on `day`.
    fn spares(&self, test: &str, day: u64) -> bool {
        turns(&self.passed).get(test).is_some_and(|&turn| turn as u64 != day % TURNS as u64)
    }
}

/// The turn of each test, of [`TURNS`] that take equally long, as far as whole tests allow: the longest
/// first, each in the shortest turn so far.
fn turns(seconds: &BTreeMap<String, u32>) -> BTreeMap<&str, usize> {
    let mut tests: Vec<(&str, u32)> = seconds.iter().map(|(test, &own)| (test.as_str(), own)).collect();
    tests.sort_by_key(|&(_, own)| std::cmp::Reverse(own));
    let mut sums = [0; TURNS];
    tests
        .into_iter()
        .map(|(test, own)| {
            let turn = (0..TURNS).min_by_key(|&turn| sums[turn]).expect("there are turns");
            sums[turn] += own.max(1);
            (test, turn)
        })
        .collect()
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

/// Days since 1970.
fn today() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |own| own.as_secs() / 86400)
}

/// The emulator for a test that runs; it has passed once this is dropped.
pub(crate) struct Running {
    test: String,
    began: Instant,
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
            known.passed.insert(self.test.clone(), self.began.elapsed().as_secs() as u32);
            let text = ron::ser::to_string_pretty(&known, ron::ser::PrettyConfig::new()).expect("plain data");
            atomic_file::write(&file, (text + "\n").as_bytes()).expect("the target folder can be written");
        }
    }
}

/// The emulator, unless `test` has passed on these sources, or there is no C++ compiler; both are said.
pub(crate) fn unless_known(test: &str) -> Option<Running> {
    let here = Known::read(&stamps()).passed.contains_key(test);
    let committed = || Known::read(&root().join(COMMITTED)).spares(test, today());
    if !is_set(RECORD) && !is_set(ONLY) && (here || committed()) {
        // Past the test's capture: it explains the time that the suite takes.
        let _ = writeln!(std::io::stderr(), "{test}: has passed on these sources ({RECORD}=1 runs it)");
        return None;
    }
    let emulator = emulator(test)?;
    Some(Running { test: test.to_owned(), began: Instant::now(), emulator })
}

#[test]
fn every_test_has_a_day_and_every_day_takes_as_long() {
    let seconds = [60, 50, 40, 33, 30, 30, 25, 25, 20, 20, 15, 12, 8, 5, 5, 2, 0, 0, 0, 0];
    let passed: BTreeMap<String, u32> =
        seconds.iter().enumerate().map(|(i, &own)| (format!("test{i}"), own)).collect();
    let known = Known { sources: String::new(), passed };
    for first in [0, 20_780] {
        let mut runs = BTreeMap::new();
        for day in first..first + TURNS as u64 {
            let drawn: Vec<&String> = known.passed.keys().filter(|test| !known.spares(test, day)).collect();
            let sum: u32 = drawn.iter().map(|test| known.passed[*test]).sum();
            assert!((48..=62).contains(&sum), "day {day}: {sum} s, {drawn:?}");
            drawn.into_iter().for_each(|test| *runs.entry(test).or_insert(0) += 1);
        }
        assert!(runs.len() == seconds.len() && runs.values().all(|&own| own == 1), "{runs:?}");
    }
    assert!(!known.spares("another", 0), "what is not listed runs");
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
