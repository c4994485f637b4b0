//! Which kernel computes a problem: remembered, tuned, planned, or of the built-in bundle.

use std::collections::HashMap;
use std::iter::{once, once_with};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fa_core::{Arch, Dtype, Family, KernelSpec, Pass, Problem};
use fa_kernels::Kernels;
use fa_kernels::bundle::Bundle;
use fa_planner::cost::{CostConstants, predict};
use fa_planner::plan::{PlanError, PlanOptions, best, plan};

use crate::clean::{Clean, first_clean};
use crate::error::Error;
use crate::tune::{Tables, TuneKey, TunedEntry};
use crate::tuning::{Job, Scratch, Tried, Tuner, Tuning, TuningOutcome, candidates, search, winner};

/// Choices that are remembered at the most, some 4 MB: lengths that never come again must not fill the memory
/// of a server.
const REMEMBERED: usize = 4096;

/// Chooses kernels for one GPU, and remembers what it chose.
#[derive(Default)]
pub(crate) struct Chooser {
    memory: Arc<Memory>,
    tuner: Mutex<Option<Arc<Tuner>>>,
}

/// What is remembered, by the caller's threads and the one that measures.
#[derive(Debug, Default)]
struct Memory {
    choices: Mutex<Choices>,
    /// The tables of tuned kernels, read when the first choice is made.
    tables: Mutex<Option<Tables>>,
    /// Winners that came into them.
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

    /// Uses the winner of a search from now on, and keeps it in the table at `path`.
    fn keep(&self, path: &Path, gpu: &str, entry: TunedEntry) -> Result<(), Error> {
        let kept = lock(&self.tables).get_or_insert_with(Tables::read).keep(path, gpu, entry);
        // What was chosen before is chosen again, by the table.
        self.choices().chosen.clear();
        self.winners.fetch_add(1, Ordering::Release);
        kept
    }
}

impl Chooser {
    /// The first kernel that `bind` takes. Where tuning is on, the problem is measured later, unless
    /// `is_capturing`.
    pub(crate) fn choose<P>(
        &self,
        kernels: &Kernels,
        problem: &Problem,
        family: Option<Family>,
        pass: Pass,
        is_capturing: impl Fn() -> bool,
        bind: impl Fn(&KernelSpec) -> Result<P, fa_kernels::Error>,
    ) -> Result<P, Error> {
        let key = key(problem, family, pass);
        let (remembered, is_preferred) = {
            let choices = self.memory.choices();
            (choices.get(&key).cloned(), choices.preferred.contains_key(&key))
        };
        let native = Family::native(kernels.arch());
        let wanted = family.unwrap_or(native);
        if let Some(spec) = remembered {
            let bound = bind(&spec)?;
            if !is_preferred {
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
        let tuned = self.tuned(kernels, problem, wanted, pass, &bind);
        let (bound, spec) = match tuned {
            Some(tuned) => tuned,
            None => {
                let ahead = || Bundle::embedded().specs(kernels.arch());
                planned_or_ahead((problem, kernels.arch(), pass), &families, ahead, &bind)?
            }
        };
        self.memory.choices().remember(key, spec.clone());
        self.offer(kernels, problem, (wanted, pass), &spec, is_capturing);
        Ok(bound)
    }

    /// Gives the problem to the thread that measures, where tuning is on and it has not been measured.
    fn offer(
        &self,
        kernels: &Kernels,
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
            let gpu = kernels.context().name().ok();
            gpu.is_none_or(|gpu| self.memory.look(|tables| tables.has(&gpu, problem, family, pass)))
        };
        tuner.offer(job, || is_capturing() || is_known());
    }

    /// Switches tuning on or off. Winners are kept in the table at `path`, which is read in place of the
    /// user's.
    pub(crate) fn set_tuning(&self, kernels: &Kernels, tuning: Tuning, path: PathBuf) -> Result<(), Error> {
        tuning.check()?;
        let tuner = match tuning {
            Tuning::Off => None,
            Tuning::OnFirstUse { candidates, budget } => {
                *lock(&self.memory.tables) = Some(Tables::with_own(&path)?);
                self.memory.choices().chosen.clear();
                let gpu = kernels.context().name().map_err(Error::driver("asking the GPU's name"))?;
                let like = kernels.on(kernels.context())?;
                let keeper = Keeper { memory: self.memory.clone(), path, gpu, budget };
                let mut scratch: Option<Scratch> = None;
                Some(Arc::new(Tuner::start(move |job, stop| {
                    let tried = measure(&mut scratch, &like, job, (candidates, budget), stop);
                    keeper.outcome(job, tried)
                })?))
            }
        };
        // The one before ends outside of the lock.
        let before = std::mem::replace(&mut *lock(&self.tuner), tuner);
        drop(before);
        Ok(())
    }

    /// Waits for what is being measured; what came of it.
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
        let pass = spec.kernel.pass();
        self.memory.choices().prefer(key(problem, None, pass), spec);
        Ok(())
    }

    /// The kernel that won by measurement, where one did and it still compiles.
    fn tuned<P>(
        &self,
        kernels: &Kernels,
        problem: &Problem,
        family: Family,
        pass: Pass,
        bind: impl Fn(&KernelSpec) -> Result<P, fa_kernels::Error>,
    ) -> Option<(P, KernelSpec)> {
        let gpu = kernels.context().name().ok()?;
        let spec = self.memory.look(|tables| tables.find(&gpu, problem, family, pass))?;
        match bind(&spec) {
            Ok(bound) => Some((bound, spec)),
            Err(error) => {
                tracing::warn!(%spec, %error, "the tuned kernel is passed over: tune again");
                None
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
                    outcome.winner = Some(spec);
                    outcome.error = self.memory.keep(&self.path, &self.gpu, entry).err();
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
    asked: (&Problem, Arch, Pass),
    families: &[Family],
    ahead: impl Fn() -> A,
    bind: impl Fn(&KernelSpec) -> Result<P, fa_kernels::Error>,
) -> Result<(P, KernelSpec), Error> {
    use fa_kernels::Error::{BadCompiler, NoCompiler};
    match planned(asked, families, &bind) {
        Err(Error::Kernels(error @ (NoCompiler { .. } | BadCompiler { .. }))) => {
            let (_, arch, pass) = asked;
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
    (problem, arch, pass): (&Problem, Arch, Pass),
    families: &[Family],
    bind: impl Fn(&KernelSpec) -> Result<P, fa_kernels::Error>,
) -> Result<(P, KernelSpec), Error> {
    let mut first_error = None;
    for &family in families {
        let options = PlanOptions { family: Some(family), pass, ..PlanOptions::default() };
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
    (problem, arch, pass): (&Problem, Arch, Pass),
    families: &[Family],
    ahead: impl Iterator<Item = &'a KernelSpec>,
    bind: impl Fn(&KernelSpec) -> Result<P, fa_kernels::Error>,
) -> Option<Result<(P, KernelSpec), Error>> {
    let constants = CostConstants::of(arch);
    let suits = |spec: &&KernelSpec| {
        families.contains(&spec.kernel.family()) && spec.kernel.pass() == pass && spec.serves(problem).is_ok()
    };
    let spec = ahead
        .filter(suits)
        .map(|spec| (predict(problem, spec, arch, &constants).seconds, spec))
        .min_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.to_string().cmp(&b.1.to_string())))?
        .1;
    Some(bind(spec).map(|bound| (bound, spec.clone())).map_err(Error::from))
}

/// All that a choice depends on, as RON text: plain data, looked up when a problem is bound and not in a
/// launch.
fn key(problem: &Problem, family: Option<Family>, pass: Pass) -> String {
    ron::to_string(&(problem, family, pass)).expect("plain structs of numbers and names always serialise")
}

/// Kernels by the key of a problem: what a caller prefers for good, what was chosen as long as there is room.
#[derive(Debug, Default)]
struct Choices {
    preferred: HashMap<String, KernelSpec>,
    chosen: HashMap<String, KernelSpec>,
}

impl Choices {
    /// The kernel for the problem of `key`.
    fn get(&self, key: &str) -> Option<&KernelSpec> {
        self.preferred.get(key).or_else(|| self.chosen.get(key))
    }

    /// Keeps `spec`, which may be forgotten: it is chosen again at the cost of planning, a quarter of a
    /// millisecond.
    fn remember(&mut self, key: String, spec: KernelSpec) {
        if self.chosen.len() >= REMEMBERED {
            self.chosen.clear();
        }
        self.chosen.insert(key, spec);
    }

    /// Keeps `spec` for good.
    fn prefer(&mut self, key: String, spec: KernelSpec) {
        self.preferred.insert(key, spec);
    }
}

#[cfg(test)]
mod tests {
    use fa_core::{Arch, Dtype, Mask, Problem};
    use fa_planner::plan::{PlanOptions, plan};

    use super::*;

    #[test]
    fn without_a_compiler_the_best_of_what_was_compiled_ahead_computes() {
        let problem = Problem::square(1, 1024, 4, 128, Mask::FULL, Dtype::Bf16);
        let asked = (&problem, Arch::Sm90, Pass::Forward);
        let plans = |family| {
            let options = PlanOptions { family: Some(family), ..PlanOptions::default() };
            plan(&problem, Arch::Sm90, &options).expect("there are plans").into_iter().map(|plan| plan.spec)
        };
        let families = [Family::Sm90, Family::Sm80];
        let specs: Vec<KernelSpec> =
            plans(Family::Sm80).take(1).chain(plans(Family::Sm90).skip(9).take(3)).collect();
        let none = || fa_kernels::Error::NoCompiler { library: "NVRTC", tried: String::new(), variable: "X" };
        let bad = || fa_kernels::Error::BadCompiler { path: "lib".into(), reason: "no library".to_owned() };
        for lacks in [none as fn() -> fa_kernels::Error, bad] {
            let bind = |spec: &KernelSpec| specs.contains(spec).then_some(()).ok_or_else(lacks);
            let ((), spec) = planned_or_ahead(asked, &families, || specs.iter(), bind).expect("one computes");
            assert_eq!(spec, specs[1], "the fastest of three of SM90's and one of SM80's");
        }
        // Nothing is compiled ahead for the problem, or at all.
        let bind = |_: &KernelSpec| Err::<(), _>(none());
        let wide = Problem { head_dim: 192, head_dim_v: 192, ..problem };
        let asked = (&wide, Arch::Sm90, Pass::Forward);
        let error = planned_or_ahead(asked, &families, || specs.iter(), bind).expect_err("another head dim");
        let text = error.to_string();
        assert!(
            text.contains("none of the 4 kernels compiled ahead for sm90 computes this forward"),
            "{text}"
        );
        let error = planned_or_ahead(asked, &families, || [].iter(), bind).expect_err("nothing");
        assert!(matches!(error, Error::Kernels(fa_kernels::Error::NoCompiler { .. })), "{error}");
        // What is no want of a compiler is told as it is.
        let lost = |_: &KernelSpec| Err::<(), _>(fa_kernels::Error::Device { major: 7, minor: 5 });
        let error = planned_or_ahead(asked, &families, || specs.iter(), lost).expect_err("an old GPU");
        assert!(matches!(error, Error::Kernels(fa_kernels::Error::Device { .. })), "{error}");
    }

    #[test]
    fn a_winner_is_remembered_and_read_back_and_damage_is_left_alone() {
        let problem = Problem::square(2, 4096, 16, 128, Mask::CAUSAL, Dtype::Bf16);
        let plans = plan(&problem, Arch::Sm90, &PlanOptions::default()).expect("there are plans");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("tuned.ron");
        let memory = Arc::new(Memory::default());
        *lock(&memory.tables) = Some(Tables::with_own(&path).expect("none is empty"));
        let budget = Duration::from_secs(1);
        let keeper = Keeper { memory: memory.clone(), path: path.clone(), gpu: "GPU".to_owned(), budget };
        let (family, pass) = (Family::Sm90, Pass::Forward);
        let job = Job { problem, pass, family, bound: plans[0].spec.clone() };
        let tried =
            |index: usize, ms: f64| Tried { spec: plans[index].spec.clone(), ms: Some(ms), error: None };
        memory.choices().remember("a".to_owned(), plans[0].spec.clone());

        let outcome = keeper.outcome(&job, Ok(vec![tried(0, 1.0), tried(5, 0.8), tried(9, 0.9)]));
        assert!(outcome.error.is_none() && outcome.winner.as_ref() == Some(&plans[5].spec), "{outcome:?}");
        let found = |tables: &Tables| tables.find("GPU", &problem, family, pass);
        assert_eq!(memory.look(found), Some(plans[5].spec.clone()));
        assert!(memory.choices().get("a").is_none(), "what was chosen is chosen again");
        let again = Tables::with_own(&path).expect("read back");
        assert_eq!(found(&again), Some(plans[5].spec.clone()));
        assert!(again.has("GPU", &problem, family, pass));
        assert!(!again.has("GPU", &problem, family, Pass::BACKWARD));
        let longer = Problem::square(2, 8192, 16, 128, Mask::CAUSAL, Dtype::Bf16);
        assert!(!again.has("GPU", &longer, family, pass), "near is not it");

        std::fs::write(&path, "damaged").expect("written");
        let outcome = keeper.outcome(&job, Ok(vec![tried(0, 1.0), tried(9, 0.5)]));
        assert!(matches!(outcome.error, Some(Error::BadTuned { .. })), "{outcome:?}");
        assert_eq!(std::fs::read_to_string(&path).expect("it is there"), "damaged");
        assert_eq!(memory.look(found), Some(plans[5].spec.clone()));
        let outcome = keeper.outcome(&job, Err(Error::NoTunedTable));
        assert!(outcome.winner.is_none() && outcome.error.is_some());
    }

    #[test]
    fn what_is_preferred_stays_and_what_is_chosen_takes_bounded_room() {
        let problem = Problem::square(1, 1024, 4, 128, Mask::FULL, Dtype::Bf16);
        let mut plans = plan(&problem, Arch::Sm80, &PlanOptions::default()).expect("there are plans");
        let (first, second) = (plans.swap_remove(0).spec, plans.swap_remove(0).spec);
        let mut choices = Choices::default();
        choices.remember("a".to_owned(), first.clone());
        choices.prefer("a".to_owned(), second.clone());
        for i in 0..2 * REMEMBERED {
            choices.remember(i.to_string(), first.clone());
            assert_eq!(choices.get(&i.to_string()), Some(&first));
            assert!(choices.chosen.len() <= REMEMBERED);
        }
        assert_eq!(choices.get("a"), Some(&second));
        assert_eq!(choices.get("0"), None);
    }
}
