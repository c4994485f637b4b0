//! The choice of the kernel for a problem: remembered, tuned, planned, or from the built-in bundle.

use std::collections::HashMap;
use std::iter::{once, once_with};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fa_core::{Arch, Division, Dtype, Family, KernelSpec, Pass, Problem};
use fa_kernels::Kernels;
use fa_kernels::bundle::Bundle;
use fa_planner::cost::{CostConstants, predict};
use fa_planner::plan::{PlanError, PlanOptions, best, plan};

use crate::clean::{Clean, first_clean};
use crate::error::Error;
use crate::tune::{Tables, TuneKey, TunedEntry};
use crate::tuning::{Job, Scratch, Tried, Tuner, Tuning, TuningOutcome, candidates, search, winner};

/// Choices that are remembered at most, some 4 MB: lengths that never recur must not fill a server's memory.
const REMEMBERED: usize = 4096;

/// The GPU that kernels are chosen for.
pub(crate) trait Seat {
    /// Its architecture.
    fn arch(&self) -> Arch;

    /// Its name, the key of tables of tuned kernels.
    ///
    /// # Errors
    /// What the driver reports.
    fn name(&self) -> Result<String, Error>;
}

impl Seat for Kernels {
    fn arch(&self) -> Arch {
        Kernels::arch(self)
    }

    fn name(&self) -> Result<String, Error> {
        self.context().name().map_err(Error::driver("asking the GPU's name"))
    }
}

/// Chooses kernels for one GPU, and remembers what it chose.
#[derive(Default)]
pub(crate) struct Chooser {
    memory: Arc<Memory>,
    tuner: Mutex<Option<Arc<Tuner>>>,
}

/// What is remembered, shared by the callers' threads and the one that measures.
#[derive(Debug, Default)]
struct Memory {
    choices: Mutex<Choices>,
    /// The tables of tuned kernels, read when the first choice is made.
    tables: Mutex<Option<Tables>>,
    /// Winners added to them.
    winners: AtomicU64,
}

impl Memory {
    fn choices(&self) -> MutexGuard<'_, Choices> {
        lock(&self.choices)
    }

    /// What the tables say.
    fn look<R>(&self, ask: impl FnOnce(&Tables) -> R) -> R {
        ask(lock(&self.tables).get_or_insert_with(Tables::read))
    }

    /// Drops the entries of a kernel until the tables are read again; returns whether there were any.
    fn forget(&self, gpu: &str, spec: &KernelSpec) -> bool {
        lock(&self.tables).get_or_insert_with(Tables::read).forget(gpu, spec)
    }

    /// Uses the winner of a search from now on, and keeps it in the table at `path`.
    fn keep(&self, path: &Path, gpu: &str, entry: TunedEntry) -> Result<(), Error> {
        let kept = lock(&self.tables).get_or_insert_with(Tables::read).keep(path, gpu, entry);
        // What was chosen before is chosen again, by the table.
        self.choices().forget_chosen();
        self.winners.fetch_add(1, Ordering::Release);
        kept
    }
}

/// What a kernel is chosen for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Asked<'a> {
    pub problem: &'a Problem,
    /// `None` for the fastest that the GPU has.
    pub family: Option<Family>,
    pub pass: Pass,
    /// What the caller decides of a forward.
    pub division: Division,
}

impl<'a> Asked<'a> {
    pub(crate) fn of(problem: &'a Problem, pass: Pass) -> Asked<'a> {
        Asked { problem, family: None, pass, division: Division::PLANNED }
    }

    /// Everything that a choice depends on, as text; looked up when a problem is bound, never in a launch.
    fn key(&self) -> String {
        let Asked { problem, family, pass, division: Division { splits, pack_gqa } } = *self;
        // Of how many parts there are only the launch takes notice.
        let split = splits.map(|parts| parts > 1);
        format!("{:?}", (problem, family, pass, split, pack_gqa))
    }
}

impl Chooser {
    /// The first kernel that `bind` takes. Where tuning is on, the problem is measured later, unless
    /// `is_capturing`, or the caller has decided.
    pub(crate) fn choose<P>(
        &self,
        kernels: &impl Seat,
        asked: Asked<'_>,
        is_capturing: impl Fn() -> bool,
        bind: impl Fn(&KernelSpec) -> Result<P, fa_kernels::Error>,
    ) -> Result<P, Error> {
        let Asked { problem, family, pass, division } = asked;
        let is_measured = division == Division::PLANNED;
        let key = asked.key();
        let (remembered, is_preferred, age) = {
            let choices = self.memory.choices();
            (choices.get(&key).cloned(), choices.preferred.contains_key(&key), choices.age)
        };
        let native = Family::native(kernels.arch());
        let wanted = family.unwrap_or(native);
        if let Some(spec) = remembered {
            let bound = bind(&spec)?;
            if !is_preferred && is_measured {
                self.offer(kernels, problem, (wanted, pass), &spec, is_capturing);
            }
            return Ok(bound);
        }
        // Kernels by mma.sync run everywhere: what is left when none of the architecture's own compiles
        // cleanly.
        let families = match family {
            Some(family) => vec![family],
            None if native == Family::Sm80 => vec![native],
            None => vec![native, Family::Sm80],
        };
        let tuned = if is_measured { self.tuned(kernels, problem, wanted, pass, &bind) } else { None };
        let (bound, spec) = match tuned {
            Some(tuned) => tuned,
            None => {
                let ahead = || Bundle::embedded().specs(kernels.arch());
                planned_or_ahead((asked, kernels.arch()), &families, ahead, &bind)?
            }
        };
        self.memory.choices().remember(age, key, spec.clone());
        if is_measured {
            self.offer(kernels, problem, (wanted, pass), &spec, is_capturing);
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
        // What stands in for another family's kernel has no entry that would be found.
        if bound.kernel.family() != family {
            return;
        }
        let job = Job { problem: *problem, pass, family, bound: bound.clone() };
        let is_known = || {
            let gpu = kernels.name().ok();
            gpu.is_none_or(|gpu| self.memory.look(|tables| tables.has(&gpu, problem, family, pass)))
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
        let mut scratch: Option<Scratch> = None;
        let measure =
            move |job: &Job, stop: &AtomicBool| measure(&mut scratch, &like, job, (candidates, budget), stop);
        self.tune_by(kernels, budget, path, measure)
    }

    /// Starts measuring problems with `measure`, which knows the number of candidates and the budget.
    fn tune_by(
        &self,
        seat: &impl Seat,
        budget: Duration,
        path: PathBuf,
        mut measure: impl FnMut(&Job, &AtomicBool) -> Result<Vec<Tried>, Error> + Send + 'static,
    ) -> Result<(), Error> {
        let gpu = seat.name()?;
        *lock(&self.memory.tables) = Some(Tables::with_own(&path)?);
        self.memory.choices().forget_chosen();
        let keeper = Keeper { memory: self.memory.clone(), path, gpu, budget };
        let tuner = Tuner::start(move |job, stop| keeper.outcome(job, measure(job, stop)))?;
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
        self.memory.choices().prefer(key, spec);
        Ok(())
    }

    /// The kernel that won by measurement, where one did and it still compiles. One that does not compile
    /// cleanly any more is forgotten, so that the problem is measured again where tuning is on.
    fn tuned<P>(
        &self,
        kernels: &impl Seat,
        problem: &Problem,
        family: Family,
        pass: Pass,
        bind: impl Fn(&KernelSpec) -> Result<P, fa_kernels::Error>,
    ) -> Option<(P, KernelSpec)> {
        let gpu = kernels.name().ok()?;
        loop {
            let spec = self.memory.look(|tables| tables.find(&gpu, problem, family, pass))?;
            match bind(&spec) {
                Ok(bound) => return Some((bound, spec)),
                Err(error) => {
                    tracing::warn!(%spec, %error, "the tuned kernel is passed over: tune again");
                    let is_stale = matches!(error, fa_kernels::Error::Refused { .. });
                    if !is_stale || !self.memory.forget(&gpu, &spec) {
                        return None;
                    }
                }
            }
        }
    }
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
    let scratch = match scratch {
        Some(scratch) => scratch,
        None => scratch.insert(Scratch::open(like)?),
    };
    let tried = match problem.types.qkv {
        Dtype::F16 => search(&mut scratch.bench::<half::f16>(problem, *pass)?, &specs, budget, stop),
        Dtype::Bf16 => search(&mut scratch.bench::<half::bf16>(problem, *pass)?, &specs, budget, stop),
        // No kernel is bound for these.
        Dtype::F32 | Dtype::E4m3 => Vec::new(),
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
    /// Keeps the winner of what was tried.
    fn outcome(&self, job: &Job, tried: Result<Vec<Tried>, Error>) -> TuningOutcome {
        let Job { problem, pass, family, .. } = *job;
        let mut outcome =
            TuningOutcome { problem, pass, family, tried: Vec::new(), winner: None, error: None };
        match tried {
            Ok(tried) => outcome.tried = tried,
            Err(error) => outcome.error = Some(error),
        }
        if outcome.error.is_none() {
            match winner(&outcome.tried, self.budget) {
                Ok(best) => {
                    let ms = best.ms.unwrap_or(f64::INFINITY);
                    let tflops = (problem.flops(pass) / (ms * 1e9) * 10.0).round() / 10.0;
                    let spec = best.spec.clone();
                    let entry = TunedEntry { key: TuneKey::of(&problem), spec: spec.clone(), tflops };
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is behind them is whole whatever a panicking thread was doing.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The best of the planner's kernels that compiles cleanly; where there is no compiler that works, the best
/// of those that were compiled `ahead`.
fn planned_or_ahead<'a, P, A: Iterator<Item = &'a KernelSpec>>(
    asked: (Asked<'_>, Arch),
    families: &[Family],
    ahead: impl Fn() -> A,
    bind: impl Fn(&KernelSpec) -> Result<P, fa_kernels::Error>,
) -> Result<(P, KernelSpec), Error> {
    use fa_kernels::Error::{BadCompiler, NoCompiler};
    match planned(asked, families, &bind) {
        Err(Error::Kernels(error @ (NoCompiler { .. } | BadCompiler { .. }))) => {
            let (Asked { pass, .. }, arch) = asked;
            tracing::warn!(%error, "only kernels that were compiled ahead run");
            compiled_ahead(asked, families, ahead(), bind).ok_or_else(|| match ahead().count() {
                0 => Error::Kernels(error),
                have => Error::NoneAhead { arch, pass, have, compiler: Box::new(error) },
            })?
        }
        planned => planned,
    }
}

/// The best of the planner's kernels that compiles cleanly, of the first family that has one.
fn planned<P>(
    (Asked { problem, pass, division, .. }, arch): (Asked<'_>, Arch),
    families: &[Family],
    bind: impl Fn(&KernelSpec) -> Result<P, fa_kernels::Error>,
) -> Result<(P, KernelSpec), Error> {
    let mut first_error = None;
    for &family in families {
        let options = PlanOptions { family: Some(family), pass, division, ..PlanOptions::default() };
        let best = match best(problem, arch, &options) {
            Ok(best) => best.spec,
            Err(error) => {
                first_error.get_or_insert(Error::Plan(error));
                continue;
            }
        };
        // All are ranked only where the first does not compile cleanly.
        let ranked = || plan(problem, arch, &options).unwrap_or_default().into_iter().map(|plan| plan.spec);
        let specs = once(best).chain(once_with(ranked).flatten());
        match first_clean(specs, &bind) {
            Ok(Some(Clean { bound, spec, .. })) => return Ok((bound, spec)),
            Ok(None) => {}
            // A plan's registers are a prediction: those of another family may be enough.
            Err(error @ fa_kernels::Error::Refused { .. }) => {
                first_error.get_or_insert(error.into());
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(first_error.unwrap_or(Error::Plan(PlanError::NoneFits { arch, tried: 0, nearest: Vec::new() })))
}

/// The kernel that is predicted to be fastest of those compiled `ahead`; `None` when none computes the
/// problem.
fn compiled_ahead<'a, P>(
    (Asked { problem, pass, division, .. }, arch): (Asked<'_>, Arch),
    families: &[Family],
    ahead: impl Iterator<Item = &'a KernelSpec>,
    bind: impl Fn(&KernelSpec) -> Result<P, fa_kernels::Error>,
) -> Option<Result<(P, KernelSpec), Error>> {
    let constants = CostConstants::of(arch);
    let suits = |spec: &&KernelSpec| {
        let serves = spec.serves(problem).is_ok() && division.admits(spec, problem);
        families.contains(&spec.kernel.family()) && spec.kernel.pass() == pass && serves
    };
    let spec = ahead
        .filter(suits)
        .map(|spec| (predict(problem, spec, arch, &constants).seconds, spec))
        .min_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.to_string().cmp(&b.1.to_string())))?
        .1;
    Some(bind(spec).map(|bound| (bound, spec.clone())).map_err(Error::from))
}

/// Kernels by the key of a problem: a caller's preferences are kept for good, choices while there is room.
#[derive(Debug, Default)]
struct Choices {
    preferred: HashMap<String, KernelSpec>,
    chosen: HashMap<String, KernelSpec>,
    /// How often what was chosen has been forgotten.
    age: u64,
}

impl Choices {
    /// The kernel for the problem of `key`.
    fn get(&self, key: &str) -> Option<&KernelSpec> {
        self.preferred.get(key).or_else(|| self.chosen.get(key))
    }

    /// Keeps `spec`, which may be forgotten: it is chosen again at the cost of planning, a quarter of a
    /// millisecond. Not where choices were forgotten since it was looked for at `age`: it may be one of them.
    fn remember(&mut self, age: u64, key: String, spec: KernelSpec) {
        if age != self.age {
            return;
        }
        if self.chosen.len() >= REMEMBERED {
            self.chosen.clear();
        }
        self.chosen.insert(key, spec);
    }

    /// Forgets what was chosen, since tables say otherwise now.
    fn forget_chosen(&mut self) {
        self.chosen.clear();
        self.age += 1;
    }

    /// Keeps `spec` for good.
    fn prefer(&mut self, key: String, spec: KernelSpec) {
        self.preferred.insert(key, spec);
    }
}

#[cfg(test)]
mod tests;
