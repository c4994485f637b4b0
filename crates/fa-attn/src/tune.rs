//! Measured choices: which kernel won for which kind of problem on which GPU.
//!
//! `fa tune` writes them. An engine reads the tables once, when it first chooses a kernel, and remembers what
//! it chose. A table is plain JSON. One for the H100 ships with the library; the user's own takes precedence.

mod key;

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fa_core::{Family, KernelSpec, Pass, PinnedSpec, Problem, Types};
use serde::{Deserialize, Serialize};

use fa_kernels::{atomic_file, cache};

use crate::error::Error;

pub use key::TuneKey;

/// Environment variable with the path of the user's table.
pub const TUNED_VARIABLE: &str = "FA_TUNED";

/// The tables that ship, by file name. That of the H100 SXM was measured by `fa tune --marks sm80`;
/// docs/results/tune/ has every candidate. That of the H200 is for `fa tune --marks models`, of both passes.
static SHIPPED: &[(&str, &str)] =
    &[("h100.json", include_str!("../tuned/h100.json")), ("h200.json", include_str!("../tuned/h200.json"))];

/// How long to wait for a table that another process is changing: a change takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// The winner for a key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TunedEntry {
    /// The kind of problem.
    pub key: TuneKey,
    /// The kernel.
    pub spec: KernelSpec,
    /// Parts of the keys of a forward's tile; `None` for as many as the planner takes, as in the entries of
    /// searches, since the best number depends on lengths that one key stands for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub splits: Option<usize>,
    /// Its rate when it won, in TFLOP/s.
    pub tflops: f64,
    /// What it was compiled by and from when an engine measured it: with another compiler or other sources it
    /// is measured again. `None` in tables that ship and those of `fa tune`, which stand until replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<Code>,
}

/// What a kernel is compiled by and from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Code {
    /// Name and version, as in `nvrtc 13.0 (89012224 B)`.
    pub compiler: String,
    /// The hash of compiler, flags and sources: the kernel's entry in the cache.
    pub key: String,
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
            match Tuned::from_json(text) {
                Ok(table) => all.gpus.extend(table.gpus),
                Err(error) => tracing::error!(name, %error, "a shipped table of tuned kernels is left out"),
            }
        }
        all
    }

    /// Reads and checks a table.
    ///
    /// # Errors
    /// Text that is not a table, the first invalid spec, and the first key with a length of 0.
    pub fn from_json(text: &str) -> Result<Tuned, String> {
        if text.trim_start().starts_with(['(', '/']) {
            return Err("it is RON, as tables were before, and they are JSON now".to_owned());
        }
        let table: Tuned = serde_json::from_str(text).map_err(|e| e.to_string())?;
        for entry in table.gpus.iter().flat_map(|gpu| &gpu.entries) {
            let TunedEntry { spec, splits, .. } = entry;
            let pinned = PinnedSpec { archs: Vec::new(), spec: spec.clone(), splits: *splits };
            pinned.check().map_err(|e| format!("{spec}: {e}"))?;
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

    /// The table as JSON, an entry on each line, which [`Tuned::from_json`] reads back.
    pub fn to_json(&self) -> String {
        let gpus = self.gpus.iter().map(|TunedGpu { gpu, entries }| {
            let entries: Vec<String> = entries.iter().map(json).collect();
            format!("{{\"gpu\": {}, \"entries\": [\n{}\n]}}", json(gpu), entries.join(",\n"))
        });
        format!("{{\"gpus\": [\n{}\n]}}\n", gpus.collect::<Vec<_>>().join(",\n"))
    }

    /// The table at `path`; an empty one where there is no file.
    ///
    /// # Errors
    /// [`Error::Read`], and [`Error::BadTuned`] for a file that is no table.
    pub fn read(path: &Path) -> Result<Tuned, Error> {
        match fs::read_to_string(path) {
            Ok(text) => {
                Tuned::from_json(&text).map_err(|reason| Error::BadTuned { path: path.to_owned(), reason })
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
        Ok(atomic_file::write(path, self.to_json().as_bytes())?)
    }

    /// Applies `change` to the table at `path`, and returns it with the result of writing it. The folder is
    /// locked meanwhile, so that no other process changes the table; if it cannot be locked within two
    /// seconds, the change is made all the same, and the later of two writers wins.
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

    /// Drops the entries of `spec` for `gpu`; returns whether there were any.
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

    /// Adds `entry`, replacing an entry with the same key, family, pass and compiler whose kernel finds its
    /// rows and changes its scores in the same way: an entry for a cache in pages does not replace one for
    /// dense rows. One of no compiler replaces those of all.
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
        let compiler = |entry: &TunedEntry| entry.code.as_ref().map(|code| code.compiler.clone());
        let (own, by) = (id(&entry), compiler(&entry));
        let place = entries.iter().position(|known| id(known) == own);
        entries.retain(|known| {
            id(known) != own || (by.is_some() && compiler(known).is_some_and(|known| Some(known) != by))
        });
        entries.insert(place.unwrap_or(entries.len()).min(entries.len()), entry);
    }

    /// Whether a kernel of this family and pass that computes this problem was measured for problems with
    /// exactly its key, possibly in the other 16-bit type, in an entry of which `is_current` holds.
    fn has(
        &self,
        gpu: &str,
        problem: &Problem,
        (family, pass): (Family, Pass),
        is_current: impl Fn(&TunedEntry) -> bool,
    ) -> bool {
        let key = TuneKey::of(problem);
        let entries = self.gpus.iter().filter(|known| known.gpu == gpu).flat_map(|known| &known.entries);
        entries
            .filter(|entry| entry.spec.kernel.family() == family && entry.spec.kernel.pass() == pass)
            .filter(|entry| entry.key.distance(&key) == Some(0))
            .any(|entry| of_type(entry, problem).serves(problem).is_ok() && is_current(entry))
    }

    /// The entry with a kernel of `wanted` for `problem` on `gpu`, that computes `pass`: that of the nearest
    /// key, its kernel in the problem's own type.
    pub fn find(&self, gpu: &str, problem: &Problem, wanted: Family, pass: Pass) -> Option<TunedEntry> {
        self.find_current(gpu, problem, (wanted, pass), |_| true)
    }

    /// [`Tuned::find`], of several entries for the nearest key the first of which `is_current` holds.
    fn find_current(
        &self,
        gpu: &str,
        problem: &Problem,
        (wanted, pass): (Family, Pass),
        is_current: impl Fn(&TunedEntry) -> bool,
    ) -> Option<TunedEntry> {
        let key = TuneKey::of(problem);
        let entries = self.gpus.iter().filter(|known| known.gpu == gpu).flat_map(|known| &known.entries);
        let near = entries
            .filter(|entry| entry.spec.kernel.family() == wanted && entry.spec.kernel.pass() == pass)
            .filter_map(|entry| Some(((entry.key.distance(&key)?, entry.key.dtype != key.dtype), entry)))
            .filter(|(_, entry)| of_type(entry, problem).serves(problem).is_ok());
        let near: Vec<_> = near.collect();
        let nearest = near.iter().map(|(distance, _)| *distance).min()?;
        let nearest = near.iter().filter(|(distance, _)| *distance == nearest).map(|(_, entry)| *entry);
        let nearest: Vec<&TunedEntry> = nearest.collect();
        let current = if nearest.len() > 1 { nearest.iter().find(|entry| is_current(entry)) } else { None };
        let entry = *current.or(nearest.first())?;
        Some(TunedEntry { spec: of_type(entry, problem), ..entry.clone() })
    }
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("plain structs of numbers and names always serialise")
}

/// The entry's kernel in the problem's type.
fn of_type(entry: &TunedEntry, problem: &Problem) -> KernelSpec {
    KernelSpec { types: Types::same(problem.types.q), ..entry.spec.clone() }
}

/// A lock on the folder of the table at `path`, held until it is dropped; `None` where it cannot be locked.
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

/// The path of the user's table: FA_TUNED, or `tuned.json` beside the kernel cache; `None` where neither is
/// known.
pub fn user_table() -> Option<PathBuf> {
    let named = std::env::var_os(TUNED_VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from);
    named.or_else(|| Some(cache::default_root()?.parent()?.join("tuned.json")))
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

    /// Drops the entries of `spec`; returns whether there were any.
    pub(crate) fn forget(&mut self, gpu: &str, spec: &KernelSpec) -> bool {
        self.own.forget(gpu, spec) | self.shipped.forget(gpu, spec)
    }

    /// Whether one of them has an entry of exactly the problem's key of which `is_current` holds.
    pub(crate) fn has(
        &self,
        gpu: &str,
        problem: &Problem,
        kind: (Family, Pass),
        is_current: impl Fn(&TunedEntry) -> bool,
    ) -> bool {
        [&self.own, &self.shipped].into_iter().any(|table| table.has(gpu, problem, kind, &is_current))
    }

    /// The entry for `problem` on `gpu` of the tables that ship.
    pub(crate) fn find_shipped(
        &self,
        gpu: &str,
        problem: &Problem,
        family: Family,
        pass: Pass,
    ) -> Option<TunedEntry> {
        self.shipped.find(gpu, problem, family, pass)
    }

    /// The entry for `problem` on `gpu` of the user's table, or else of those that ship.
    pub(crate) fn find(
        &self,
        gpu: &str,
        problem: &Problem,
        kind: (Family, Pass),
        is_current: impl Fn(&TunedEntry) -> bool,
    ) -> Option<TunedEntry> {
        let found = |table: &Tuned| table.find_current(gpu, problem, kind, &is_current);
        found(&self.own).or_else(|| found(&self.shipped))
    }
}

#[cfg(test)]
mod tests;
