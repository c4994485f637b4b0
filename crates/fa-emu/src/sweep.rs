//! A kernel on the shapes at which kernels fail, under several schedules.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use fa_core::{KernelSpec, Problem};
use fa_lab::grid::{Extent, of_spec};

pub use crate::case::Case;
use crate::error::Error;
use crate::options::Options;
use crate::planned::Planned;
use crate::proof::{Proof, Trial};
use crate::unit::Unit;

/// Seeds of a sweep: an eager schedule, a lazy one, and a random one.
pub const SEEDS: [u64; 3] = [0, 1, 2];

/// The cases of a kernel: those of [`fa_lab::grid::of_spec`] that an emulation runs in seconds. A GPU runs
/// them too (`fa validate`), with the rest of that list.
pub fn cases(spec: &KernelSpec) -> Vec<Case> {
    let cases = of_spec("emulated", "the kernel", spec, Extent::Emulated);
    cases.iter().map(|case| Case::of_grid(case).expect("no tensor is broadcast or far")).collect()
}

/// Trials computed so far, for specs that share them.
#[derive(Debug, Default)]
pub struct Trials(Mutex<BTreeMap<String, Arc<Trial>>>);

impl Trials {
    /// The trial of a case.
    pub fn get(&self, case: &Case, spec: &KernelSpec) -> Arc<Trial> {
        let mut pass = spec.kernel.pass();
        // Deterministic or not, gradients are the same.
        if let fa_core::Pass::Backward { deterministic } = &mut pass {
            *deterministic = false;
        }
        let key = format!("{case:?} {pass:?}");
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        known.unwrap_or_else(|| {
            let trial = Arc::new(Trial::with(&case.problem, pass, case.placement, &case.extras));
            self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(key, trial.clone());
            trial
        })
    }
}

/// The result of a sweep of one kernel.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// Passes that were run.
    pub runs: usize,
    /// The faults, with the case and the seed.
    pub faults: Vec<String>,
}

/// Runs a kernel on cases under all seeds; a deterministic kernel's outputs must be the same bits in all of
/// them.
///
/// # Errors
/// Those of [`Unit::run`].
pub fn sweep(unit: &Unit, cases: &[Case], seeds: &[u64], trials: &Trials) -> Result<Verdict, Error> {
    let mut verdict = Verdict::default();
    for case in cases {
        let trial = trials.get(case, unit.spec());
        let schedules: Vec<Options> = seeds.iter().map(|&seed| Options::of(unit.spec(), seed)).collect();
        let Attempts { runs, faults } = try_all(unit, &trial, &schedules)?;
        verdict.runs += runs;
        if let Some((seed, faults)) = faults {
            let problem = &case.problem;
            let faults = faults.join("\n");
            verdict.faults.push(format!("{problem:?}, {:?}, seed {seed}:\n{faults}", case.placement));
        }
    }
    Ok(verdict)
}

/// The result of a trial under several schedules.
#[derive(Clone, Debug, Default)]
pub(crate) struct Attempts {
    /// How many runs there were.
    pub(crate) runs: usize,
    /// The seed of the schedule with faults, and the faults.
    pub(crate) faults: Option<(u64, Vec<String>)>,
}

/// Runs a kernel on a trial under every schedule, up to the first one with faults. A deterministic kernel's
/// outputs must be the same bits in all of them.
///
/// # Errors
/// Those of [`Unit::run`].
pub(crate) fn try_all(unit: &Unit, trial: &Trial, schedules: &[Options]) -> Result<Attempts, Error> {
    let mut bits: Option<String> = None;
    for (turn, options) in schedules.iter().enumerate() {
        let proof = trial.run(unit, options)?;
        let mut faults = proof.faults();
        if faults.is_empty() && turn == 0 {
            faults.extend(beside_the_plan(unit, trial.problem(), options.sms, &proof));
        }
        if unit.spec().kernel.pass().deterministic() && faults.is_empty() {
            let first = bits.get_or_insert_with(|| proof.bits.clone());
            if *first != proof.bits {
                faults.push("not deterministic: other bits than under the first seed".into());
            }
        }
        if !faults.is_empty() {
            return Ok(Attempts { runs: turn + 1, faults: Some((options.seed, faults)) });
        }
    }
    Ok(Attempts { runs: schedules.len(), faults: None })
}

/// Differences of the main kernel from the plan.
fn beside_the_plan(unit: &Unit, problem: &Problem, sms: u32, proof: &Proof) -> Vec<String> {
    let spec = unit.spec();
    let Some(planned) = Planned::of(spec, problem, unit.arch(), sms) else { return Vec::new() };
    let main = proof.outcome.launches.iter().find(|launch| launch.entry == fa_kernels::ENTRY);
    main.map_or_else(Vec::new, |launch| planned.faults(spec, &launch.counters))
}
