//! Kernels proven by emulation: every case of a unit under every schedule.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fa_core::{Arch, KernelSpec};
use fa_kernels::Headers;

use crate::emulator::{Emulator, source};
use crate::error::Error;
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

/// The result of one candidate.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// The candidate.
    pub candidate: Candidate,
    /// Passes that were run.
    pub runs: usize,
    /// Its faults; none if it is proven.
    pub faults: Vec<String>,
    /// Time to compile and to run it.
    pub took: (Duration, Duration),
}

/// Runs the candidates on `workers` threads; none is begun after `until`. `report` is called with each
/// result, one at a time.
///
/// # Errors
/// The first [`Error`] of a candidate.
pub fn prove(
    emulator: &Emulator,
    candidates: Vec<Candidate>,
    workers: usize,
    until: Option<Instant>,
    report: &mut (dyn FnMut(&Attempt) + Send),
) -> Result<(), Error> {
    let trials = Trials::default();
    let waiting = Mutex::new(candidates.into_iter().rev().collect::<Vec<_>>());
    let report = Mutex::new(report);
    let failed = Mutex::new(None);
    let work = || {
        while until.is_none_or(|until| Instant::now() < until) {
            let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(candidate) = next else { break };
            match prove_one(emulator, candidate, &trials) {
                Ok(result) => report.lock().unwrap_or_else(PoisonError::into_inner)(&result),
                Err(error) => {
                    *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                    break;
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..workers.max(1) {
            scope.spawn(work);
        }
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

fn prove_one(emulator: &Emulator, candidate: Candidate, trials: &Trials) -> Result<Attempt, Error> {
    let Candidate { spec, arch, .. } = &candidate;
    let started = Instant::now();
    let unit = emulator.unit_of(spec, *arch, &source(spec, *arch, &Headers::embedded())?)?;
    let compiled = started.elapsed();
    let verdict = sweep(&unit, &cases(spec), &SEEDS, trials)?;
    let took = (compiled, started.elapsed() - compiled);
    Ok(Attempt { candidate, runs: verdict.runs, faults: verdict.faults, took })
}
