//! Records of kernels proven by emulation, by the hash of all that a proof depends on, so that an unchanged
//! kernel is not run again.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fa_core::{Arch, KernelSpec};
use fa_cpu::threads::together;
use fa_kernels::Headers;
use fa_lab::record::today;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::case::Case;
use crate::compiler::hash;
use crate::emulator::{Emulator, source};
use crate::error::Error;
use crate::handed::handed;
use crate::machine::version;
use crate::ron_file;
use crate::sweep::{SEEDS, Trials, cases, sweep};

/// A kernel to be proven.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Its name: a shipped file, a spec.
    pub name: String,
    /// The kernel.
    pub spec: KernelSpec,
    /// The architecture that it is compiled for.
    pub arch: Arch,
}

/// A kernel that has been proven.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Proven {
    /// Its name.
    pub kernel: String,
    /// The architecture that it was compiled for.
    pub arch: Arch,
    /// `Source::fingerprint` of the kernel.
    pub fingerprint: String,
    /// [`crate::version`] of the machine.
    pub machine: String,
    /// A hash of both, the cases, what the library launches for them, and the seeds.
    pub key: String,
    /// Passes that were run.
    pub runs: usize,
    /// The day, UTC.
    pub date: String,
}

/// The kernels that have been proven, in a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// By name and architecture.
    pub proven: Vec<Proven>,
}

impl Record {
    /// The record in a file; empty where there is no file.
    ///
    /// # Errors
    /// [`Error::Record`] for a file that cannot be read or is no record.
    pub fn read(path: &Path) -> Result<Record, Error> {
        ron_file::read(path)
    }

    /// Adds proofs, each in place of an older one of the same kernel, and writes the file; it appears whole
    /// or not at all.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(mut self, path: &Path, more: &[Proven]) -> Result<Record, Error> {
        let new: BTreeSet<_> = more.iter().map(|own| (&own.kernel, own.arch)).collect();
        self.proven.retain(|own| !new.contains(&(&own.kernel, own.arch)));
        self.proven.extend(more.iter().cloned());
        self.proven.sort();
        ron_file::write(path, &self)?;
        Ok(self)
    }

    fn has(&self, key: &str) -> bool {
        self.proven.iter().any(|own| own.key == key)
    }
}

/// The result of one candidate.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// The candidate.
    pub candidate: Candidate,
    /// Its proof; `None` if there were faults.
    pub proven: Option<Proven>,
    /// Whether a record had it already.
    pub known: bool,
    /// Its faults.
    pub faults: Vec<String>,
    /// Time to compile and to run it.
    pub took: (Duration, Duration),
}

/// Proves the candidates that the record does not have, on `workers` threads; `report` is called with each
/// result.
///
/// # Errors
/// The first [`Error`] of a candidate.
pub fn prove(
    emulator: &Emulator,
    candidates: Vec<Candidate>,
    records: &[Record],
    workers: usize,
    report: &(dyn Fn(&Attempt) + Sync),
) -> Result<Vec<Attempt>, Error> {
    let trials = Trials::default();
    let waiting = Mutex::new(candidates.into_iter().rev().collect::<Vec<_>>());
    let done = Mutex::new(Vec::new());
    let failed = Mutex::new(None);
    together(workers, || {
        loop {
            let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(candidate) = next else { break };
            match prove_one(emulator, candidate, records, &trials) {
                Ok(result) => {
                    report(&result);
                    done.lock().unwrap_or_else(PoisonError::into_inner).push(result);
                }
                Err(error) => {
                    *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                    break;
                }
            }
        }
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(done.into_inner().unwrap_or_else(PoisonError::into_inner)),
    }
}

fn prove_one(
    emulator: &Emulator,
    candidate: Candidate,
    records: &[Record],
    trials: &Trials,
) -> Result<Attempt, Error> {
    let Candidate { name, spec, arch } = &candidate;
    let source = source(spec, *arch, &Headers::embedded())?;
    let cases = cases(spec);
    let (fingerprint, machine) = (source.fingerprint(), version());
    let handed = handed(spec, *arch, &cases)?;
    let key = key([&fingerprint, &machine, &handed], *arch, &cases, &SEEDS);
    if records.iter().any(|record| record.has(&key)) {
        let took = (Duration::ZERO, Duration::ZERO);
        return Ok(Attempt { candidate, proven: None, known: true, faults: Vec::new(), took });
    }
    let started = Instant::now();
    let unit = emulator.unit_of(spec, *arch, &source)?;
    let compiled = started.elapsed();
    let verdict = sweep(&unit, &cases, &SEEDS, trials)?;
    let proven = verdict.faults.is_empty().then(|| Proven {
        kernel: name.clone(),
        arch: *arch,
        fingerprint,
        machine,
        key,
        runs: verdict.runs,
        date: today(),
    });
    let took = (compiled, started.elapsed() - compiled);
    Ok(Attempt { candidate, proven, known: false, faults: verdict.faults, took })
}

/// A hash of all that a proof depends on.
fn key([fingerprint, machine, handed]: [&str; 3], arch: Arch, cases: &[Case], seeds: &[u64]) -> String {
    let cases: Vec<_> = cases.iter().map(Case::data).collect();
    let tried = json!([arch, cases, seeds]).to_string();
    hash(&[fingerprint, machine, handed, &tried])[..32].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_keeps_one_proof_of_a_kernel() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("emulated.ron");
        let proof = |key: &str| Proven {
            kernel: "a".into(),
            arch: Arch::Sm90,
            fingerprint: "f".into(),
            machine: "m".into(),
            key: key.into(),
            runs: 21,
            date: today(),
        };
        assert_eq!(Record::read(&path).unwrap(), Record::default());
        Record::default().write(&path, &[proof("1")]).unwrap();
        let record = Record::read(&path).unwrap().write(&path, &[proof("2")]).unwrap();
        assert_eq!(Record::read(&path).unwrap(), record);
        assert!(record.has("2") && !record.has("1"));
        // A damaged record is not taken for an empty one, which would be written over it.
        std::fs::write(&path, "(proven: [").unwrap();
        assert!(Record::read(&path).unwrap_err().to_string().contains("emulated.ron"));
    }
}
