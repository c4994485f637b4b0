//! Measured choices: which kernel won for which kind of problem on which GPU.
//!
//! `fa tune` writes them. An engine reads the tables once, when it first chooses a kernel, and remembers what
//! it chose. A table is plain RON. One for the H100 ships with the library; the user's own goes before it.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fa_core::{Dtype, Family, KernelSpec, MaskKind, Pass, Problem, Types};
use serde::{Deserialize, Serialize};

use fa_kernels::{atomic_file, cache};

use crate::error::Error;

/// Environment variable with the path of the user's table.
pub const TUNED_VARIABLE: &str = "FA_TUNED";

/// The tables that ship, by file name.
static SHIPPED: &[(&str, &str)] = &[("h100.ron", include_str!("../tuned/h100.ron"))];

/// The most doublings of lengths and heads, taken together, by which a problem may differ from one that was
/// measured.
const FARTHEST: u32 = 3;

/// How long a table is waited for that another process is changing: a change takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// What a choice depends on: all that a kernel is specialised on, and the problem's size by powers of two.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TuneKey {
    /// Element type.
    pub dtype: Dtype,
    /// Head dim of Q and K.
    pub head_dim: usize,
    /// Head dim of V.
    pub head_dim_v: usize,
    /// Masking code.
    pub mask: MaskKind,
    /// Whether scores are capped.
    pub softcap: bool,
    /// Query heads per K/V head.
    pub group: usize,
    /// Queries of a sequence, rounded up to a power of two.
    pub seqlen_q: usize,
    /// Keys of a sequence, rounded up to a power of two.
    pub seqlen_k: usize,
    /// Query heads over all sequences, rounded up to a power of two.
    pub heads: usize,
}

impl TuneKey {
    /// The key of `problem`.
    pub fn of(problem: &Problem) -> TuneKey {
        // Lengths are bounded by the problem's check: their next power of two exists.
        let bucket = |n: usize| n.max(1).checked_next_power_of_two().unwrap_or(usize::MAX);
        TuneKey {
            dtype: problem.types.qkv,
            head_dim: problem.head_dim,
            head_dim_v: problem.head_dim_v,
            mask: MaskKind::of(&problem.mask),
            softcap: problem.score.softcap.is_some(),
            group: problem.group_size(),
            seqlen_q: bucket(problem.lengths.max_q()),
            seqlen_k: bucket(problem.lengths.max_k()),
            heads: bucket(problem.lengths.sequences().saturating_mul(problem.heads_q)),
        }
    }

    /// Doublings between two keys; `None` where a kernel for one does not suit the other. The 16-bit types
    /// take the same time, so that they stand in for one another.
    fn distance(&self, other: &TuneKey) -> Option<u32> {
        let same = |key: &TuneKey| (key.head_dim, key.head_dim_v, key.mask, key.softcap, key.group);
        if same(self) != same(other) {
            return None;
        }
        let apart = |a: usize, b: usize| a.ilog2().abs_diff(b.ilog2());
        let doublings = apart(self.seqlen_q, other.seqlen_q)
            + apart(self.seqlen_k, other.seqlen_k)
            + apart(self.heads, other.heads);
        (doublings <= FARTHEST).then_some(doublings)
    }
}

/// The winner for a key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TunedEntry {
    /// The kind of problem.
    pub key: TuneKey,
    /// The kernel.
    pub spec: KernelSpec,
    /// Its rate when it won, in TFLOP/s.
    pub tflops: f64,
}

/// The choices for one GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TunedGpu {
    /// The product's name as the driver gives it.
    pub gpu: String,
    /// At most one per key and family of kernels.
    pub entries: Vec<TunedEntry>,
}

/// A table: the choices for any number of GPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuned {
    /// One per GPU.
    pub gpus: Vec<TunedGpu>,
}

impl Tuned {
    /// The tables that ship with the library. One that cannot be read is left out with a traced warning.
    pub fn shipped() -> Tuned {
        let mut all = Tuned::default();
        for (name, text) in SHIPPED {
            match Tuned::from_ron(text) {
                Ok(table) => all.gpus.extend(table.gpus),
                Err(error) => tracing::error!(name, %error, "a shipped table of tuned kernels is left out"),
            }
        }
        all
    }

    /// Reads and checks a table.
    ///
    /// # Errors
    /// Text that is no table, the first spec that is none, and the first key with a length of 0.
    pub fn from_ron(text: &str) -> Result<Tuned, String> {
        let table: Tuned = ron::from_str(text).map_err(|e| e.to_string())?;
        for entry in table.gpus.iter().flat_map(|gpu| &gpu.entries) {
            entry.spec.check().map_err(|e| format!("{}: {e}", entry.spec))?;
            let TuneKey { seqlen_q, seqlen_k, heads, .. } = entry.key;
            // Distances between keys count doublings.
            for (name, length) in [("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k), ("heads", heads)] {
                if length == 0 {
                    return Err(format!("{}: its key has {name} = 0, it must be at least 1", entry.spec));
                }
            }
        }
        Ok(table)
    }

    /// The table as RON, which [`Tuned::from_ron`] reads back.
    pub fn to_ron(&self) -> String {
        ron::ser::to_string_pretty(self, ron::ser::PrettyConfig::default().depth_limit(4))
            .expect("plain structs of numbers and names always serialise")
            + "\n"
    }

    /// The table at `path`; an empty one where there is no file.
    ///
    /// # Errors
    /// [`Error::Read`], and [`Error::BadTuned`] for a file that is no table.
    pub fn read(path: &Path) -> Result<Tuned, Error> {
        match fs::read_to_string(path) {
            Ok(text) => {
                Tuned::from_ron(&text).map_err(|reason| Error::BadTuned { path: path.to_owned(), reason })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Tuned::default()),
            Err(source) => Err(Error::Read { path: path.to_owned(), source }),
        }
    }

    /// Replaces the file at `path` in one step; its folder is made where it is missing.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        Ok(atomic_file::write(path, self.to_ron().as_bytes())?)
    }

    /// Changes the table at `path` by `change`, and returns it with what came of writing it: read,
    /// changed and replaced while no other process does the same. What is locked meanwhile is the folder;
    /// where that cannot be, or stays locked for two seconds, the change is made all the same, and the
    /// later of two at once stays.
    ///
    /// # Errors
    /// As [`Tuned::read`], after which nothing is changed. [`Error::Write`] stands beside the table.
    pub fn change(path: &Path, change: impl FnOnce(&mut Tuned)) -> Result<(Tuned, Result<(), Error>), Error> {
        let lock = lock_folder(path);
        let mut table = Tuned::read(path)?;
        change(&mut table);
        let written = table.write(path);
        drop(lock);
        Ok((table, written))
    }

    /// Leaves out the entries of `spec` for `gpu`; whether there were any.
    fn forget(&mut self, gpu: &str, spec: &KernelSpec) -> bool {
        let mut found = false;
        for known in self.gpus.iter_mut().filter(|known| known.gpu == gpu) {
            let before = known.entries.len();
            // Entries stand in for the other 16-bit type.
            known.entries.retain(|entry| KernelSpec { types: spec.types, ..entry.spec.clone() } != *spec);
            found |= known.entries.len() < before;
        }
        found
    }

    /// Puts `entry` in the place of an entry with the same key, family and pass, whose kernel finds its
    /// rows and changes its scores in the same way: a cache in pages does not take the place of dense
    /// rows.
    pub fn set(&mut self, gpu: &str, entry: TunedEntry) {
        let known = self.gpus.iter().position(|known| known.gpu == gpu);
        let index = known.unwrap_or_else(|| {
            self.gpus.push(TunedGpu { gpu: gpu.to_owned(), entries: Vec::new() });
            self.gpus.len() - 1
        });
        let entries = &mut self.gpus[index].entries;
        let id = |entry: &TunedEntry| {
            let TunedEntry { key, spec, .. } = entry;
            (key.clone(), spec.kernel.family(), spec.kernel.pass(), spec.score, spec.reads)
        };
        match entries.iter_mut().find(|known| id(known) == id(&entry)) {
            Some(known) => *known = entry,
            None => entries.push(entry),
        }
    }

    /// Whether a kernel of `family` for `pass` that computes this problem was measured for problems with
    /// exactly its key, be it of the other 16-bit type.
    pub fn has(&self, gpu: &str, problem: &Problem, family: Family, pass: Pass) -> bool {
        let key = TuneKey::of(problem);
        let entries = self.gpus.iter().filter(|known| known.gpu == gpu).flat_map(|known| &known.entries);
        entries
            .filter(|entry| entry.spec.kernel.family() == family && entry.spec.kernel.pass() == pass)
            .filter(|entry| entry.key.distance(&key) == Some(0))
            .any(|entry| of_type(entry, problem).serves(problem).is_ok())
    }

    /// The kernel of `wanted` for `problem` on `gpu`, that computes `pass`: that of the nearest
    /// key, in the problem's own type.
    pub fn find(&self, gpu: &str, problem: &Problem, wanted: Family, pass: Pass) -> Option<KernelSpec> {
        let key = TuneKey::of(problem);
        self.gpus
            .iter()
            .filter(|known| known.gpu == gpu)
            .flat_map(|known| &known.entries)
            .filter(|entry| entry.spec.kernel.family() == wanted && entry.spec.kernel.pass() == pass)
            .filter_map(|entry| Some((entry.key.distance(&key)?, entry.key.dtype != key.dtype, entry)))
            .map(|(doublings, other_type, entry)| (doublings, other_type, of_type(entry, problem)))
            .filter(|(_, _, spec)| spec.serves(problem).is_ok())
            .min_by_key(|(doublings, other_type, _)| (*doublings, *other_type))
            .map(|(_, _, spec)| spec)
    }
}

/// The entry's kernel in the problem's type.
fn of_type(entry: &TunedEntry, problem: &Problem) -> KernelSpec {
    KernelSpec { types: Types::same(problem.types.qkv), ..entry.spec.clone() }
}

/// The lock of the folder of the table at `path`, held until it is dropped; `None` where there is none to be
/// had.
fn lock_folder(path: &Path) -> Option<File> {
    let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    fs::create_dir_all(folder).ok()?;
    let file = File::open(folder).ok()?;
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Some(file),
            Err(TryLockError::WouldBlock) if begun.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "the table is changed without its lock");
                return None;
            }
        }
    }
}

/// Where the user's table lies: FA_TUNED, or `tuned.ron` beside the kernel cache; `None` where there is no
/// place for it.
pub fn user_table() -> Option<PathBuf> {
    let named = std::env::var_os(TUNED_VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from);
    named.or_else(|| Some(cache::default_root()?.parent()?.join("tuned.ron")))
}

/// The user's table and those that ship.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    own: Tuned,
    shipped: Tuned,
}

impl Tables {
    /// Reads them. A user's table that cannot be read is left out with a traced warning.
    pub(crate) fn read() -> Tables {
        let own = user_table().map_or_else(Tuned::default, |path| {
            Tuned::read(&path).unwrap_or_else(|error| {
                tracing::warn!(%error, "the table of tuned kernels is passed over");
                Tuned::default()
            })
        });
        Tables { own, shipped: Tuned::shipped() }
    }

    /// As [`Tables::read`], with the table at `path` for the user's.
    ///
    /// # Errors
    /// As [`Tuned::read`].
    pub(crate) fn with_own(path: &Path) -> Result<Tables, Error> {
        Ok(Tables { own: Tuned::read(path)?, shipped: Tuned::shipped() })
    }

    /// Puts `entry` into the user's table, here and at `path`, where others may have added theirs meanwhile.
    ///
    /// # Errors
    /// As [`Tuned::read`], after which nothing is changed, and as [`Tuned::write`], after which the entry is
    /// in use here.
    pub(crate) fn keep(&mut self, path: &Path, gpu: &str, entry: TunedEntry) -> Result<(), Error> {
        let (own, written) = Tuned::change(path, |own| own.set(gpu, entry))?;
        self.own = own;
        written
    }

    /// Leaves out the entries of `spec`; whether there were any.
    pub(crate) fn forget(&mut self, gpu: &str, spec: &KernelSpec) -> bool {
        self.own.forget(gpu, spec) | self.shipped.forget(gpu, spec)
    }

    /// Whether one of them has an entry of exactly the problem's key.
    pub(crate) fn has(&self, gpu: &str, problem: &Problem, family: Family, pass: Pass) -> bool {
        [&self.own, &self.shipped].into_iter().any(|table| table.has(gpu, problem, family, pass))
    }

    /// The kernel for `problem` on `gpu` by the user's table, or else by those that ship.
    pub(crate) fn find(
        &self,
        gpu: &str,
        problem: &Problem,
        family: Family,
        pass: Pass,
    ) -> Option<KernelSpec> {
        let found = |table: &Tuned| table.find(gpu, problem, family, pass);
        found(&self.own).or_else(|| found(&self.shipped))
    }
}

#[cfg(test)]
mod tests {
    use fa_core::{Alibi, Arch, Lengths, Mask, ScoreMod, Side};
    use fa_planner::account::account;
    use fa_planner::plan::{PlanOptions, plan};

    use super::*;

    const PROBLEM: Problem = Problem::square(2, 4096, 16, 128, Mask::CAUSAL, Dtype::Bf16);

    fn entry(problem: &Problem, rank: usize) -> TunedEntry {
        let spec =
            plan(problem, Arch::Sm90, &PlanOptions::default()).expect("there are plans")[rank].spec.clone();
        TunedEntry { key: TuneKey::of(problem), spec, tflops: 1.0 }
    }

    fn found(table: &Tuned, problem: &Problem) -> Option<KernelSpec> {
        table.find("GPU", problem, Family::Sm90, Pass::Forward)
    }

    #[test]
    fn the_nearest_measured_problem_decides() {
        let longer = Problem { lengths: Lengths::uniform(1, 8192, 8192), ..PROBLEM };
        let mut table = Tuned::default();
        table.set("GPU", entry(&PROBLEM, 0));
        // The two differ however the planner ranks either problem.
        let far = entry(&PROBLEM, 1).spec;
        table.set("GPU", TunedEntry { spec: far.clone(), ..entry(&longer, 0) });
        let spec = |rank| Some(entry(&PROBLEM, rank).spec);
        assert_eq!(found(&table, &PROBLEM), spec(0));
        assert_eq!(
            found(
                &table,
                &Problem { lengths: Lengths::uniform(PROBLEM.lengths.sequences(), 3000, 2500), ..PROBLEM }
            ),
            spec(0)
        );
        assert_eq!(
            found(
                &table,
                &Problem { lengths: Lengths::uniform(longer.lengths.sequences(), 16000, 8000), ..longer }
            ),
            Some(far)
        );
        let half =
            found(&table, &Problem { types: Types::same(Dtype::F16), ..PROBLEM }).expect("types stand in");
        assert_eq!((half.types.qkv, Some(half.kernel)), (Dtype::F16, spec(0).map(|spec| spec.kernel)));
        for other in [
            Problem {
                lengths: Lengths::uniform(PROBLEM.lengths.sequences(), 1, PROBLEM.lengths.max_k()),
                ..PROBLEM
            },
            Problem { head_dim: 120, ..PROBLEM },
            Problem { mask: Mask::FULL, ..PROBLEM },
            Problem { score: ScoreMod::softcap(3.0), ..PROBLEM },
            Problem { heads_kv: 8, ..PROBLEM },
        ] {
            assert_eq!(found(&table, &other), None, "{other:?}");
        }
        assert_eq!(table.find("another GPU", &PROBLEM, Family::Sm90, Pass::Forward), None);
        assert_eq!(table.find("GPU", &PROBLEM, Family::Sm80, Pass::Forward), None);
    }

    #[test]
    fn the_users_table_goes_before_those_that_ship() {
        let table = |rank: usize| {
            let mut table = Tuned::default();
            table.set("GPU", entry(&PROBLEM, rank));
            table
        };
        let found = |tables: &Tables| tables.find("GPU", &PROBLEM, Family::Sm90, Pass::Forward);
        let (own, shipped) = (table(3), table(0));
        let (first, second) = (entry(&PROBLEM, 3).spec, entry(&PROBLEM, 0).spec);
        assert_eq!(found(&Tables { own, shipped: shipped.clone() }), Some(first));
        assert_eq!(found(&Tables { own: Tuned::default(), shipped }), Some(second));
        assert_eq!(found(&Tables::default()), None);
    }

    #[test]
    fn an_entry_takes_the_place_of_its_key() {
        let mut table = Tuned::default();
        table.set("GPU", entry(&PROBLEM, 0));
        table.set("GPU", entry(&PROBLEM, 3));
        assert_eq!(table.gpus[0].entries, [entry(&PROBLEM, 3)]);
    }

    #[test]
    fn what_reads_or_scores_otherwise_has_its_own_entry() {
        // A cache used in part, dense rows and slopes are of one key.
        let used = Lengths::of(2, Side::padded(4096), Side::padded(4096).with_used());
        let used = Problem { lengths: used, ..PROBLEM };
        let slopes = ScoreMod { alibi: Some(Alibi::PerHead), ..ScoreMod::NONE };
        let slopes = Problem { score: slopes, ..PROBLEM };
        let mut table = Tuned::default();
        let has = |table: &Tuned, problem| table.has("GPU", problem, Family::Sm90, Pass::Forward);
        for (count, problem) in [&PROBLEM, &used, &slopes].into_iter().enumerate() {
            assert_eq!(TuneKey::of(problem), TuneKey::of(&PROBLEM));
            assert!(!has(&table, problem), "no other's entry computes {problem:?}");
            table.set("GPU", entry(problem, 0));
            assert_eq!(table.gpus[0].entries.len(), count + 1);
        }
        for problem in [&PROBLEM, &used, &slopes] {
            assert!(has(&table, problem));
            assert_eq!(found(&table, problem), Some(entry(problem, 0).spec));
        }
        assert!(table.forget("GPU", &entry(&used, 0).spec) && !has(&table, &used) && has(&table, &slopes));
        assert!(
            !table.forget("GPU", &entry(&used, 0).spec)
                && !table.forget("another GPU", &entry(&PROBLEM, 0).spec)
        );
    }

    #[test]
    fn changes_at_once_are_all_kept() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("new/tuned.ron");
        let problem = |at: usize| Problem { lengths: Lengths::uniform(1, 64 << at, 64 << at), ..PROBLEM };
        let spec = entry(&PROBLEM, 0).spec;
        std::thread::scope(|scope| {
            for at in 0..8 {
                let (path, spec) = (&path, &spec);
                scope.spawn(move || {
                    let entry =
                        TunedEntry { key: TuneKey::of(&problem(at)), spec: spec.clone(), tflops: 1.0 };
                    let (_, written) = Tuned::change(path, |table| table.set("GPU", entry)).expect("read");
                    written.expect("written");
                });
            }
        });
        let table = Tuned::read(&path).expect("whole");
        assert_eq!(table.gpus[0].entries.len(), 8);
        let beside = fs::read_dir(folder.path().join("new")).expect("a folder").count();
        assert_eq!(beside, 1, "the table alone");
    }

    #[test]
    fn tables_survive_the_disk_and_damage_is_named() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("deep/tuned.ron");
        assert_eq!(Tuned::read(&path).expect("none is empty"), Tuned::default());
        let mut table = Tuned::default();
        table.set("GPU", entry(&PROBLEM, 0));
        table.write(&path).expect("written");
        assert_eq!(Tuned::read(&path).expect("read back"), table);
        let text = table.to_ron().replace("tile_n: ", "tile_n: 1");
        fs::write(&path, text).expect("written");
        let error = Tuned::read(&path).expect_err("no such tile").to_string();
        assert!(error.contains("tile_n") && error.contains("tuned.ron"), "{error}");
        let text = table.to_ron().replace("seqlen_q: 4096", "seqlen_q: 0");
        fs::write(&path, text).expect("written");
        let error = Tuned::read(&path).expect_err("no such length").to_string();
        assert!(error.contains("seqlen_q = 0"), "{error}");
    }

    #[test]
    fn what_ships_fits_its_gpu() {
        for (name, text) in SHIPPED {
            let table = Tuned::from_ron(text).unwrap_or_else(|e| panic!("{name}: {e}"));
            for entry in table.gpus.iter().flat_map(|gpu| &gpu.entries) {
                account(&entry.spec, Arch::Sm90).unwrap_or_else(|e| panic!("{name}: {}: {e}", entry.spec));
            }
        }
    }
}
