//! The choice of the kernel for a problem: remembered, tuned, planned, or from the built-in bundle.

mod asked;
mod memory;
mod planned;
mod seat;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fa_core::{Division, Dtype, Family, KernelSpec, Pass, Problem};
use fa_kernels::Kernels;
use fa_kernels::bundle::Bundle;

use crate::error::Error;
use crate::tune::{Code, Tables, TuneKey, TunedEntry};
use crate::tuning::{Job, Scratch, Tried, Tuner, Tuning, TuningOutcome, candidates, search, winner};

pub(crate) use asked::Asked;
use memory::{Choice, Memory, lock};
use planned::planned_or_ahead;
use seat::Seat;

/// Chooses kernels for one GPU, and remembers what it chose.
#[derive(Default)]
pub(crate) struct Chooser {
    memory: Arc<Memory>,
    tuner: Mutex<Option<Arc<Tuner>>>,
}

impl Chooser {
    /// The first kernel that can be bound. Where tuning is on, the problem is measured later, unless
    /// `is_capturing`, or the caller has decided.
    pub(crate) fn choose<S: Seat>(
        &self,
        kernels: &S,
        asked: &Asked<'_>,
        is_capturing: impl Fn() -> bool,
    ) -> Result<S::Bound, Error> {
        let Asked { problem, like, family, pass, division, pinned } = *asked;
        let is_tuned = division == Division::PLANNED;
        // The bits of what is deterministic do not change with the next measurement.
        let is_measured = is_tuned && !pinned && !pass.deterministic();
        let key = asked.key();
        let (remembered, is_preferred, age) = {
            let choices = self.memory.choices();
            (choices.get(&key).cloned(), choices.preferred.contains_key(&key), choices.age)
        };
        // Of several those that come first, and the others where none of theirs compiles cleanly.
        let families = match family {
            Some(family) => vec![family],
            None => fa_planner::plan::families(like, pass, kernels.arch()),
        };
        let wanted = families[0];
        if let Some(Choice { spec, splits }) = remembered {
            match kernels.bind(problem, &spec, division.splits.or(splits)) {
                Ok(bound) => {
                    if !is_preferred && is_measured {
                        self.offer(kernels, like, (wanted, pass), &spec, is_capturing);
                    }
                    return Ok(bound);
                }
                // It compiled cleanly before; another process with this cache may have had another result.
                Err(error) if error.is_of_kernel() && !is_preferred => {
                    tracing::warn!(%error, "what was chosen before is passed over");
                }
                Err(error) => return Err(error.into()),
            }
        }
        let tuned = if is_tuned { self.tuned(kernels, asked, wanted) } else { None };
        let (bound, choice) = match tuned {
            Some(tuned) => tuned,
            None => {
                let ahead = || Bundle::embedded().specs(kernels.arch());
                let (bound, spec) = planned_or_ahead(kernels, asked, &families, ahead)?;
                (bound, spec.into())
            }
        };
        self.memory.choices().remember(age, key, choice.clone());
        if is_measured {
            self.offer(kernels, like, (wanted, pass), &choice.spec, is_capturing);
        }
        Ok(bound)
    }

    /// Queues the problem for the thread that measures, if tuning is on and it has not been measured.
    fn offer(
        &self,
        kernels: &impl Seat,
        problem: &Problem,
        (family, pass): (Family, Pass),
        bound: &KernelSpec,
        is_capturing: impl Fn() -> bool,
    ) {
        let Some(tuner) = lock(&self.tuner).clone() else { return };
        // What stands in for another family's kernel has no entry that would be found; nor has a program, or
        // K and V in codes.
        let has_entry = problem.score.program.is_none() && !problem.types.kv.is_code();
        if bound.kernel.family() != family || !has_entry {
            return;
        }
        let job = Job { problem: *problem, pass, family, bound: bound.clone() };
        let is_known = || {
            let gpu = kernels.name().ok();
            let is_current = |entry: &TunedEntry| is_current(kernels, entry);
            let has = |tables: &Tables, gpu: &str| tables.has(gpu, problem, (family, pass), is_current);
            gpu.is_none_or(|gpu| self.memory.look(|tables| has(tables, &gpu)))
        };
        tuner.offer(job, || is_capturing() || is_known());
    }

    /// Switches tuning on or off. Winners are kept in the table at `path`, which is read in place of the
    /// user's.
    pub(crate) fn set_tuning(&self, kernels: &Kernels, tuning: Tuning, path: PathBuf) -> Result<(), Error> {
        tuning.check()?;
        let Tuning::OnFirstUse { candidates, budget } = tuning else {
            self.replace(None);
            return Ok(());
        };
        let like = kernels.on(kernels.context())?;
        let codes = kernels.on(kernels.context())?;
        let mut scratch: Option<Scratch> = None;
        let measure =
            move |job: &Job, stop: &AtomicBool| measure(&mut scratch, &like, job, (candidates, budget), stop);
        self.tune_by(codes, budget, path, measure)
    }

    /// Starts measuring problems with `measure`, which knows the number of candidates and the budget.
    fn tune_by(
        &self,
        seat: impl Seat + Send + 'static,
        budget: Duration,
        path: PathBuf,
        mut measure: impl FnMut(&Job, &AtomicBool) -> Result<Vec<Tried>, Error> + Send + 'static,
    ) -> Result<(), Error> {
        let gpu = seat.name()?;
        *lock(&self.memory.tables) = Some(Tables::with_own(&path)?);
        self.memory.choices().forget_chosen();
        let keeper = Keeper { memory: self.memory.clone(), path, gpu, budget };
        let code = move |spec: &KernelSpec| seat.code(spec);
        let tuner = Tuner::start(move |job, stop| keeper.outcome(job, measure(job, stop), &code))?;
        self.replace(Some(Arc::new(tuner)));
        Ok(())
    }

    /// Replaces the tuner; the previous one is dropped after the lock is released.
    fn replace(&self, tuner: Option<Arc<Tuner>>) {
        let before = std::mem::replace(&mut *lock(&self.tuner), tuner);
        drop(before);
    }

    /// Waits until all queued problems are measured, and returns the outcomes.
    pub(crate) fn finish_tuning(&self) -> Vec<TuningOutcome> {
        let tuner = lock(&self.tuner).clone();
        tuner.map_or_else(Vec::new, |tuner| tuner.finish())
    }

    /// Winners that tuning has kept.
    pub(crate) fn winners(&self) -> u64 {
        self.memory.winners.load(Ordering::Acquire)
    }

    /// Uses `spec` for its pass of exactly this problem from now on.
    pub(crate) fn prefer(&self, problem: &Problem, spec: KernelSpec) -> Result<(), Error> {
        problem.check()?;
        spec.serves(problem).map_err(fa_kernels::Error::from)?;
        let key = Asked::of(problem, spec.kernel.pass()).key();
        self.memory.choices().prefer(key, spec.into());
        Ok(())
    }

    /// The kernel that won by measurement, where one did and it still compiles. One that does not compile
    /// cleanly any more is forgotten, so that the problem is measured again where tuning is on.
    fn tuned<S: Seat>(&self, kernels: &S, asked: &Asked<'_>, family: Family) -> Option<(S::Bound, Choice)> {
        let Asked { problem, like, pass, pinned, .. } = *asked;
        // Tables hold no kernels with programs, and none for K and V in codes.
        if like.score.program.is_some() || like.types.kv.is_code() {
            return None;
        }
        let gpu = kernels.name().ok()?;
        loop {
            let find = |tables: &Tables| match pinned {
                true => tables.find_shipped(&gpu, like, family, pass),
                false => tables.find(&gpu, like, (family, pass), |entry| is_current(kernels, entry)),
            };
            let found = self.memory.look(find)?;
            let TunedEntry { spec, splits, .. } = found;
            match kernels.bind(problem, &spec, splits) {
                Ok(bound) => return Some((bound, Choice { spec, splits })),
                Err(error) => {
                    tracing::warn!(%spec, %error, "the tuned kernel is passed over: tune again");
                    if !error.is_of_kernel() || !self.memory.forget(&gpu, &spec) {
                        return None;
                    }
                }
            }
        }
    }
}

/// Whether the kernel of an entry is compiled by and from what it was measured with, or it does not say.
fn is_current(kernels: &impl Seat, entry: &TunedEntry) -> bool {
    entry.code.is_none() || entry.code == kernels.code(&entry.spec)
}

/// Candidates measured on the GPU of `like`; `scratch` is made for the first problem.
fn measure(
    scratch: &mut Option<Scratch>,
    like: &Kernels,
    job: &Job,
    (count, budget): (usize, Duration),
    stop: &AtomicBool,
) -> Result<Vec<Tried>, Error> {
    let Job { problem, pass, family, bound } = job;
    let specs = candidates(problem, like.arch(), (*family, *pass), bound, count)?;
    if let [only] = specs.as_slice() {
        return Ok(vec![Tried { spec: only.clone(), ms: None, error: None }]);
    }
    let scratch = match scratch {
        Some(scratch) => scratch,
        None => scratch.insert(Scratch::open(like)?),
    };
    let tried = match problem.types.q {
        Dtype::F16 => search(&mut scratch.bench::<half::f16>(problem, *pass)?, &specs, budget, stop),
        Dtype::Bf16 => search(&mut scratch.bench::<half::bf16>(problem, *pass)?, &specs, budget, stop),
        // No kernel is bound for these.
        Dtype::F32 | Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => Vec::new(),
    };
    scratch.settle();
    Ok(tried)
}

/// Where winners go.
struct Keeper {
    memory: Arc<Memory>,
    path: PathBuf,
    gpu: String,
    budget: Duration,
}

impl Keeper {
    /// Keeps the winner of what was tried, with what `code` says that it is compiled by and from.
    fn outcome(
        &self,
        job: &Job,
        tried: Result<Vec<Tried>, Error>,
        code: &dyn Fn(&KernelSpec) -> Option<Code>,
    ) -> TuningOutcome {
        let Job { problem, pass, family, .. } = *job;
        let mut outcome =
            TuningOutcome { problem, pass, family, tried: Vec::new(), winner: None, error: None };
        match tried {
            Ok(tried) => outcome.tried = tried,
            Err(error) => outcome.error = Some(error),
        }
        if let [Tried { spec, ms: None, error: None }] = outcome.tried.as_slice()
            && *spec == job.bound
        {
            // There is no other kernel: nothing was measured.
            outcome.winner = Some(spec.clone());
        } else if outcome.error.is_none() {
            match winner(&outcome.tried, self.budget) {
                Ok(best) => {
                    let ms = best.ms.unwrap_or(f64::INFINITY);
                    let tflops = (problem.flops(pass) / (ms * 1e9) * 10.0).round() / 10.0;
                    let spec = best.spec.clone();
                    let (key, code) = (TuneKey::of(&problem), code(&spec));
                    let entry = TunedEntry { key, spec: spec.clone(), splits: None, tflops, code };
                    outcome.error = self.memory.keep(&self.path, &self.gpu, entry).err();
                    // A table that cannot be read is left alone, and the kernel is not used.
                    let is_used = !matches!(outcome.error, Some(Error::Read { .. } | Error::BadTuned { .. }));
                    outcome.winner = is_used.then_some(spec);
                }
                Err(error) => outcome.error = Some(error),
            }
        }
        match &outcome.error {
            Some(error) => tracing::warn!(?problem, %error, "tuning"),
            None => {
                let winner = outcome.winner.as_ref().map(KernelSpec::to_string);
                tracing::info!(?problem, ?winner, "tuned");
            }
        }
        outcome
    }
}
