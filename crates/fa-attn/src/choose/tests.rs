//! Tests of what is chosen, remembered and measured, without a GPU.

use fa_core::program::Program;
use fa_core::{Arch, ArchLimits, Dtype, Lengths, Mask, Problem, ScoreMod};
use fa_planner::plan::{PlanError, PlanOptions, plan};

use super::memory::{Choices, REMEMBERED};
use super::*;

#[test]
fn without_a_compiler_the_best_of_what_was_compiled_ahead_computes() {
    let problem = Problem::square(1, 1024, 4, 128, Mask::FULL, Dtype::Bf16);
    let asked = Asked::of(&problem, Pass::Forward);
    let plans = |family| {
        let options = PlanOptions::default().with_family(Some(family));
        plan(&problem, Arch::Sm90, &options).expect("there are plans").into_iter().map(|plan| plan.spec)
    };
    let families = [Family::Sm90, Family::Sm80];
    let specs: Vec<KernelSpec> =
        plans(Family::Sm80).take(1).chain(plans(Family::Sm90).skip(9).take(3)).collect();
    let none = || fa_kernels::Error::NoCompiler { library: "NVRTC", tried: String::new(), variable: "X" };
    let bad = || fa_kernels::Error::BadCompiler { path: "lib".into(), reason: "no library".to_owned() };
    for lacks in [none as fn() -> fa_kernels::Error, bad] {
        let gpu = Fake(|spec: &KernelSpec| specs.contains(spec).then_some(()).ok_or_else(lacks));
        let ((), spec) = planned_or_ahead(&gpu, &asked, &families, || specs.iter()).expect("one computes");
        assert_eq!(spec, specs[1], "the fastest of three of SM90's and one of SM80's");
    }
    // Nothing is compiled ahead for the problem, or at all.
    let gpu = Fake(|_: &KernelSpec| Err::<(), _>(none()));
    let wide = problem.with_head_dims(192, 192);
    let asked = Asked::of(&wide, Pass::Forward);
    let error = planned_or_ahead(&gpu, &asked, &families, || specs.iter()).expect_err("another head dim");
    let text = error.to_string();
    assert!(text.contains("none of the 4 kernels compiled ahead for sm90 computes this forward"), "{text}");
    let error = planned_or_ahead(&gpu, &asked, &families, || [].iter()).expect_err("nothing");
    assert!(matches!(error, Error::Kernels(fa_kernels::Error::NoCompiler { .. })), "{error}");
    // Errors other than a missing compiler are passed on as they are.
    let old = Fake(|_: &KernelSpec| Err::<(), _>(fa_kernels::Error::Device { major: 7, minor: 5 }));
    let error = planned_or_ahead(&old, &asked, &families, || specs.iter()).expect_err("an old GPU");
    assert!(matches!(error, Error::Kernels(fa_kernels::Error::Device { .. })), "{error}");
}

#[test]
fn a_winner_is_remembered_and_read_back_and_damage_is_left_alone() {
    let problem = Problem::square(2, 4096, 16, 128, Mask::CAUSAL, Dtype::Bf16);
    let plans = plan(&problem, Arch::Sm90, &PlanOptions::default()).expect("there are plans");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("tuned.json");
    let memory = Arc::new(Memory::default());
    *lock(&memory.tables) = Some(Tables::with_own(&path).expect("none is empty"));
    let budget = Duration::from_secs(1);
    let keeper = Keeper { memory: memory.clone(), path: path.clone(), gpu: "GPU".to_owned(), budget };
    let (family, pass) = (Family::Sm90, Pass::Forward);
    let job = Job { problem, pass, family, bound: plans[0].spec.clone() };
    let tried = |index: usize, ms: f64| Tried { spec: plans[index].spec.clone(), ms: Some(ms), error: None };
    let key = Asked::of(&problem, pass).key();
    memory.choices().remember(0, key, plans[0].spec.clone().into());

    let outcome = keeper.outcome(&job, Ok(vec![tried(0, 1.0), tried(5, 0.8), tried(9, 0.9)]), &|_| None);
    assert!(outcome.error.is_none() && outcome.winner.as_ref() == Some(&plans[5].spec), "{outcome:?}");
    let found =
        |tables: &Tables| tables.find("GPU", &problem, (family, pass), |_| true).map(|entry| entry.spec);
    assert_eq!(memory.look(found), Some(plans[5].spec.clone()));
    assert!(memory.choices().get(&key).is_none(), "what was chosen is chosen again");
    let again = Tables::with_own(&path).expect("read back");
    assert_eq!(found(&again), Some(plans[5].spec.clone()));
    assert!(again.has("GPU", &problem, (family, pass), |_| true));
    assert!(!again.has("GPU", &problem, (family, Pass::BACKWARD), |_| true));
    let longer = Problem::square(2, 8192, 16, 128, Mask::CAUSAL, Dtype::Bf16);
    assert!(!again.has("GPU", &longer, (family, pass), |_| true), "near is not it");

    std::fs::write(&path, "damaged").expect("written");
    let outcome = keeper.outcome(&job, Ok(vec![tried(0, 1.0), tried(9, 0.5)]), &|_| None);
    assert!(matches!(outcome.error, Some(Error::BadTuned { .. })), "{outcome:?}");
    assert_eq!(std::fs::read_to_string(&path).expect("it is there"), "damaged");
    assert_eq!(memory.look(found), Some(plans[5].spec.clone()));
    let outcome = keeper.outcome(&job, Err(Error::NoTunedTable), &|_| None);
    assert!(outcome.winner.is_none() && outcome.error.is_some());
}

#[test]
fn what_is_preferred_stays_and_what_is_chosen_takes_bounded_room() {
    let problem = Problem::square(1, 1024, 4, 128, Mask::FULL, Dtype::Bf16);
    let mut plans = plan(&problem, Arch::Sm80, &PlanOptions::default()).expect("there are plans");
    let mut next = || Choice::from(plans.swap_remove(0).spec);
    let (first, second) = (next(), next());
    let mut choices = Choices::default();
    let key = |keys: usize| {
        let problem = problem.with_lengths(Lengths::uniform(1, 1, keys));
        Asked::of(&problem, Pass::Forward).key()
    };
    let preferred = key(1 << 20);
    choices.remember(0, preferred, first.clone());
    choices.prefer(preferred, second.clone());
    for keys in 0..2 * REMEMBERED {
        choices.remember(0, key(keys), first.clone());
        assert_eq!(choices.get(&key(keys)), Some(&first));
        assert!(choices.chosen.len() <= REMEMBERED);
    }
    assert_eq!(choices.get(&preferred), Some(&second));
    assert_eq!(choices.get(&key(0)), None);
}

const PROBLEM: Problem = Problem::square(2, 4096, 16, 128, Mask::CAUSAL, Dtype::Bf16);

/// A GPU that has a name, and binds kernels as the function says.
struct Fake<F>(F);

impl<P, F: Fn(&KernelSpec) -> Result<P, fa_kernels::Error>> Seat for Fake<F> {
    type Bound = P;

    fn arch(&self) -> Arch {
        Arch::Sm90
    }

    fn board(&self) -> Option<ArchLimits> {
        None
    }

    fn name(&self) -> Result<String, Error> {
        Ok("GPU".to_owned())
    }

    fn code(&self, spec: &KernelSpec) -> Option<Code> {
        Some(Code { compiler: "nvrtc 13.0".to_owned(), key: spec.to_string() })
    }

    fn bind(&self, _: &Problem, spec: &KernelSpec, _: Option<usize>) -> Result<P, fa_kernels::Error> {
        (self.0)(spec)
    }
}

/// One on which every kernel compiles.
fn clean() -> Fake<impl Fn(&KernelSpec) -> Result<KernelSpec, fa_kernels::Error>> {
    Fake(|spec: &KernelSpec| Ok(spec.clone()))
}

/// Binds `problem`: every kernel compiles but `refused`.
fn bind(chooser: &Chooser, problem: &Problem, refused: Option<&KernelSpec>) -> Result<KernelSpec, Error> {
    let bind = |spec: &KernelSpec| {
        if refused == Some(spec) {
            let (name, target) = (spec.to_string(), "sm_90a".to_owned());
            let fault = fa_kernels::Fault::Spills { stores: 4, loads: 4 };
            return Err(fa_kernels::Error::Refused { name, target, fault, log_file: None });
        }
        Ok(spec.clone())
    };
    chooser.choose(&Fake(bind), &Asked::of(problem, Pass::Forward), || false)
}

/// The four kernels that the native family has for the gradients of such a problem have one tile.
#[test]
fn kernels_that_do_not_compile_end_no_call_and_are_not_tried_again() {
    let bias = Program::parse("array bias: f32[_, _, _, _]; score = s + bias[b, h, q, k];").expect("parsed");
    let score = ScoreMod::NONE.with_program(Some(bias.intern().expect("room")));
    let problem = PROBLEM.with_head_dims(80, 256).with_score(score);
    let all = plan(&problem, Arch::Sm90, &PlanOptions::default().with_pass(Pass::BACKWARD)).expect("plans");
    let native: Vec<KernelSpec> = all.into_iter().map(|plan| plan.spec).collect();
    assert!(native.iter().all(|spec| spec.tile() == native[0].tile()), "{native:?}");
    let tries = std::cell::RefCell::new(Vec::new());
    let choose = |chooser: &Chooser, fails: &[KernelSpec]| {
        tries.borrow_mut().clear();
        let bind = |spec: &KernelSpec| {
            tries.borrow_mut().push(spec.clone());
            let (name, target) = (spec.to_string(), "sm_90a".to_owned());
            match fails.contains(spec) {
                true => Err(fa_kernels::Error::Compile { name, target, log: String::new(), log_file: None }),
                false => Ok(spec.clone()),
            }
        };
        chooser.choose(&Fake(bind), &Asked::of(&problem, Pass::BACKWARD), || false).expect("one compiles")
    };
    for failing in [1, native.len()] {
        let chooser = Chooser::default();
        let bound = choose(&chooser, &native[..failing]);
        assert_eq!(native.get(failing).is_some_and(|next| bound == *next), failing == 1, "{bound}");
        assert_eq!(tries.borrow().len(), failing + 1);
        assert_eq!(choose(&chooser, &native[..failing]), bound);
        assert_eq!(*tries.borrow(), [bound]);
    }
}

/// The candidates' times: the bound kernel takes 1 ms, each further one a tenth less.
fn timed(job: &Job, count: usize) -> Result<Vec<Tried>, Error> {
    let Job { problem, pass, family, bound } = job;
    let specs = candidates(problem, Arch::Sm90, (*family, *pass), bound, count)?;
    let ms = |at: usize| Some(1.0 - 0.1 * at as f64);
    Ok(specs.into_iter().enumerate().map(|(at, spec)| Tried { spec, ms: ms(at), error: None }).collect())
}

/// A chooser whose problems are measured by [`timed`].
fn tuning(path: &std::path::Path) -> Chooser {
    let chooser = Chooser::default();
    let budget = Duration::from_secs(60);
    chooser.tune_by(clean(), budget, path.to_owned(), |job, _| timed(job, 4)).expect("a thread");
    chooser
}

#[test]
fn a_winner_that_comes_while_a_kernel_is_bound_is_used_from_the_next_bind_on() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("tuned.json");
    let chooser = Chooser::default();
    *lock(&chooser.memory.tables) = Some(Tables::with_own(&path).expect("none is empty"));
    let (gpu, budget) = ("GPU".to_owned(), Duration::from_secs(1));
    let keeper = Keeper { memory: chooser.memory.clone(), path, gpu, budget };
    // Another thread's call was measured meanwhile.
    let bind_slowly = |spec: &KernelSpec| {
        let job = Job { problem: PROBLEM, pass: Pass::Forward, family: Family::Sm90, bound: spec.clone() };
        let outcome = keeper.outcome(&job, timed(&job, 4), &|_| None);
        Ok((spec.clone(), outcome.winner.expect("a winner")))
    };
    let (bound, winner) =
        chooser.choose(&Fake(bind_slowly), &Asked::of(&PROBLEM, Pass::Forward), || false).expect("bound");
    assert_ne!(bound, winner);
    assert_eq!(bind(&chooser, &PROBLEM, None).expect("bound"), winner);
}

#[test]
fn calls_at_once_are_measured_once_and_the_next_bind_has_the_winner() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("tuned.json");
    let chooser = tuning(&path);
    let first = bind(&Chooser::default(), &PROBLEM, None).expect("bound");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| bind(&chooser, &PROBLEM, None).expect("bound"));
        }
    });
    let outcomes = chooser.finish_tuning();
    assert_eq!(outcomes.len(), 1, "{outcomes:?}");
    let winner = outcomes[0].winner.clone().expect("a winner");
    assert!(outcomes[0].tried.len() == 4 && outcomes[0].error.is_none() && winner != first);
    assert_eq!(bind(&chooser, &PROBLEM, None).expect("bound"), winner);
    // In a later process, and with the kernels of a later version of which the winner spills.
    let later = tuning(&path);
    assert_eq!(bind(&later, &PROBLEM, None).expect("bound"), winner);
    assert!(later.finish_tuning().is_empty(), "it is in the table");
    let newer = tuning(&path);
    assert_eq!(bind(&newer, &PROBLEM, Some(&winner)).expect("bound"), first);
    assert_eq!(newer.finish_tuning().len(), 1, "measured again");
}

#[test]
fn what_no_kernel_computes_is_no_job_and_an_engine_may_go_at_any_time() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("tuned.json");
    let chooser = tuning(&path);
    let odd = PROBLEM.with_head_dim(100);
    assert!(matches!(bind(&chooser, &odd, None), Err(Error::Plan(PlanError::HeadDim { value: 100, .. }))));
    assert!(chooser.finish_tuning().is_empty());

    // Dropped, or switched off, while a search runs: it ends, and has nothing to keep.
    for drops in [true, false] {
        let chooser = Chooser::default();
        let (begun, wait) = std::sync::mpsc::channel();
        let search = move |job: &Job, stop: &AtomicBool| {
            begun.send(()).expect("it is waited for");
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                std::thread::yield_now();
            }
            let tried = Tried { spec: job.bound.clone(), ms: None, error: None };
            Ok(vec![tried])
        };
        chooser.tune_by(clean(), Duration::from_secs(60), path.clone(), search).expect("a thread");
        bind(&chooser, &PROBLEM, None).expect("bound");
        wait.recv().expect("it began");
        if drops {
            drop(chooser);
        } else {
            chooser.replace(None);
            assert!(chooser.finish_tuning().is_empty(), "off");
        }
        assert!(!path.exists(), "nothing was measured");
    }
}

#[test]
fn tables_that_cannot_be_used_are_named() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let start = |path: &std::path::Path| {
        Chooser::default().tune_by(clean(), Duration::from_secs(60), path.to_owned(), |job, _| timed(job, 2))
    };
    assert!(matches!(start(folder.path()), Err(Error::Read { .. })), "a folder is no table");
    let path = folder.path().join("tuned.json");
    // Of a version that knows more.
    std::fs::write(&path, "(gpus: [], colour: \"red\")").expect("written");
    assert!(matches!(start(&path), Err(Error::BadTuned { .. })));
    // Damaged while it runs: nothing is changed, and no winner is named.
    std::fs::remove_file(&path).expect("it was there");
    let chooser = tuning(&path);
    std::fs::write(&path, "damaged").expect("written");
    let first = bind(&chooser, &PROBLEM, None).expect("bound");
    let outcomes = chooser.finish_tuning();
    assert!(matches!(outcomes[0].error, Some(Error::BadTuned { .. })) && outcomes[0].winner.is_none());
    assert_eq!(bind(&chooser, &PROBLEM, None).expect("bound"), first);
}

#[cfg(target_os = "linux")]
#[test]
fn where_the_table_cannot_be_written_the_winner_is_used_all_the_same() {
    let chooser = tuning(std::path::Path::new("/proc/none/tuned.json"));
    bind(&chooser, &PROBLEM, None).expect("bound");
    let outcomes = chooser.finish_tuning();
    assert!(matches!(outcomes[0].error, Some(Error::Write { .. })), "{outcomes:?}");
    let winner = outcomes[0].winner.clone().expect("it is used");
    assert_eq!(bind(&chooser, &PROBLEM, None).expect("bound"), winner);
}

#[test]
fn any_number_of_candidates_from_two_on_is_taken() {
    let first = bind(&Chooser::default(), &PROBLEM, None).expect("bound");
    let kind = (Family::Sm90, Pass::Forward);
    let all = candidates(&PROBLEM, Arch::Sm90, kind, &first, usize::MAX).expect("plans");
    assert!(all.len() > 8 && all[0] == first, "{}", all.len());
    for (candidates, budget, fails) in [
        (0, Duration::MAX, true),
        (1, Duration::MAX, true),
        (2, Duration::ZERO, true),
        (2, Duration::from_nanos(1), false),
        (usize::MAX, Duration::MAX, false),
    ] {
        let checked = Tuning::OnFirstUse { candidates, budget }.check();
        assert_eq!(matches!(checked, Err(Error::TuningOption { .. })), fails, "{candidates} {budget:?}");
    }
}

/// A kernel that compiled cleanly and then does not: one cache on disk serves several processes.
#[test]
fn what_was_chosen_and_is_refused_later_is_chosen_anew() {
    let chooser = Chooser::default();
    let first = bind(&chooser, &PROBLEM, None).expect("bound");
    let second = bind(&chooser, &PROBLEM, Some(&first)).expect("another kernel");
    assert_ne!(first, second);
    assert_eq!(bind(&chooser, &PROBLEM, Some(&first)).expect("remembered"), second);
    // What the caller prefers is not replaced.
    chooser.prefer(&PROBLEM, first.clone()).expect("it serves the problem");
    let error = bind(&chooser, &PROBLEM, Some(&first)).expect_err("refused");
    assert!(matches!(error, Error::Kernels(fa_kernels::Error::Refused { .. })), "{error}");
}

/// A GPU that shows what is bound.
struct Shown;

impl Seat for Shown {
    type Bound = (Problem, KernelSpec, Option<usize>);

    fn arch(&self) -> Arch {
        Arch::Sm90
    }

    fn board(&self) -> Option<ArchLimits> {
        None
    }

    fn name(&self) -> Result<String, Error> {
        Ok("GPU".to_owned())
    }

    fn code(&self, spec: &KernelSpec) -> Option<Code> {
        Some(Code { compiler: "nvrtc 13.0".to_owned(), key: spec.to_string() })
    }

    fn bind(
        &self,
        problem: &Problem,
        spec: &KernelSpec,
        splits: Option<usize>,
    ) -> Result<Self::Bound, fa_kernels::Error> {
        Ok((*problem, spec.clone(), splits))
    }
}

/// A kernel is chosen for one problem, by its table, and bound to another; a caller's splits come first.
#[test]
fn what_is_chosen_is_bound_to_the_problem_with_its_splits() {
    let of = |keys| PROBLEM.with_lengths(Lengths::uniform(1, 1, keys)).with_heads_kv(2);
    let (problem, like) = (of(8100), of(8192));
    let spec = plan(&like, Arch::Sm90, &PlanOptions::default()).expect("there are plans").swap_remove(0).spec;
    assert!(spec.split, "{spec}");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("tuned.json");
    let chooser = Chooser::default();
    *lock(&chooser.memory.tables) = Some(Tables::with_own(&path).expect("none is empty"));
    let entry =
        TunedEntry { key: TuneKey::of(&like), spec: spec.clone(), splits: Some(5), tflops: 1.0, code: None };
    chooser.memory.keep(&path, "GPU", entry).expect("kept");
    let asked = Asked { like: &like, ..Asked::of(&problem, Pass::Forward) };
    // By the table, and as it is remembered.
    for _ in 0..2 {
        let bound = chooser.choose(&Shown, &asked, || false).expect("bound");
        assert_eq!(bound, (problem, spec.clone(), Some(5)));
    }
    let division = Division { splits: Some(3), pack_gqa: None };
    let own = chooser.choose(&Shown, &Asked { division, ..asked }, || false).expect("bound");
    assert_eq!((own.0, own.2), (problem, Some(3)));
}

/// What a caller decides is chosen for by itself, and neither measured nor taken from what was.
#[test]
fn a_division_that_the_caller_decides_is_that_of_the_kernel() {
    let chooser = Chooser::default();
    let decode = PROBLEM.with_lengths(Lengths::uniform(2, 1, 4096)).with_heads_kv(2);
    let decode = decode.with_heads_q(8).with_mask(Mask::CAUSAL);
    let of = |problem: &Problem, splits, pack_gqa| {
        let division = Division { splits, pack_gqa };
        let asked = Asked { division, ..Asked::of(problem, Pass::Forward) };
        let spec = chooser.choose(&clean(), &asked, || false);
        spec.inspect(|spec| assert!(division.admits(spec, problem), "{spec}"))
    };
    let planned = of(&decode, None, None).expect("planned");
    assert!(planned.split && planned.traits().packs_gqa, "{planned}");
    assert!(!of(&decode, Some(1), None).expect("whole").split);
    assert!(!of(&decode, None, Some(false)).expect("unpacked").traits().packs_gqa);
    // The planner would not divide a long prefill, and packs this one.
    let prefill = decode.with_lengths(Lengths::uniform(2, 4096, 4096));
    let planned = of(&prefill, None, None).expect("planned");
    assert!(!planned.split && planned.traits().packs_gqa, "{planned}");
    let neither = of(&prefill, Some(3), Some(false)).expect("divided and not packed");
    assert!(neither.split && !neither.traits().packs_gqa, "{neither}");
    // One key is one step, and one head has none to share with.
    let short = decode.with_lengths(Lengths::uniform(2, 1, 1)).with_heads_kv(8);
    assert!(of(&short, Some(4), Some(true)).is_ok());
    let wide = decode.with_heads(512, 1);
    let error = of(&wide, None, Some(true)).expect_err("512 heads").to_string();
    assert!(error.contains("no tile holds the 512 query heads"), "{error}");
}

/// What keeps its bits is neither measured nor changed by what was; a later call that may change is both.
#[test]
fn what_is_pinned_or_deterministic_keeps_the_planners_kernel() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let chooser = tuning(&folder.path().join("tuned.json"));
    let free = Asked::of(&PROBLEM, Pass::Forward);
    let pinned = Asked { pinned: true, ..free };
    let choose = |asked: &Asked<'_>| chooser.choose(&clean(), asked, || false).expect("bound");
    let first = choose(&pinned);
    let gradients = choose(&Asked::of(&PROBLEM, Pass::DETERMINISTIC_BACKWARD));
    assert!(gradients.kernel.pass().deterministic());
    assert!(chooser.finish_tuning().is_empty(), "neither is measured");
    assert_eq!(choose(&free), first);
    let outcomes = chooser.finish_tuning();
    assert_eq!(outcomes.len(), 1, "{outcomes:?}");
    let winner = outcomes[0].winner.clone().expect("a winner");
    assert_ne!(winner, first);
    assert_eq!((choose(&free), choose(&pinned)), (winner, first.clone()));
    // In a later process, too.
    let later = tuning(&folder.path().join("tuned.json"));
    assert_eq!(later.choose(&clean(), &pinned, || false).expect("bound"), first);
}

/// A GPU on which every kernel compiles, by a compiler of this name.
struct Compiled(&'static str);

impl Seat for Compiled {
    type Bound = KernelSpec;

    fn arch(&self) -> Arch {
        Arch::Sm90
    }

    fn board(&self) -> Option<ArchLimits> {
        None
    }

    fn name(&self) -> Result<String, Error> {
        Ok("GPU".to_owned())
    }

    fn code(&self, spec: &KernelSpec) -> Option<Code> {
        Some(Code { compiler: self.0.to_owned(), key: format!("{} {spec}", self.0) })
    }

    fn bind(
        &self,
        _: &Problem,
        spec: &KernelSpec,
        _: Option<usize>,
    ) -> Result<KernelSpec, fa_kernels::Error> {
        Ok(spec.clone())
    }
}

/// Winners count where compiler and sources are what they were; each compiler has its own.
#[test]
fn another_compiler_measures_again_and_both_keep_their_winners() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("tuned.json");
    let asked = Asked::of(&PROBLEM, Pass::Forward);
    let mut winners = Vec::new();
    for (compiler, count, measured) in
        [("nvrtc 12.8", 2, 1), ("nvrtc 13.0", 4, 1), ("nvrtc 12.8", 4, 0), ("nvrtc 13.0", 2, 0)]
    {
        let chooser = Chooser::default();
        let budget = Duration::from_secs(60);
        let measure = move |job: &Job, _: &AtomicBool| timed(job, count);
        chooser.tune_by(Compiled(compiler), budget, path.clone(), measure).expect("a thread");
        chooser.choose(&Compiled(compiler), &asked, || false).expect("bound");
        assert_eq!(chooser.finish_tuning().len(), measured, "{compiler}");
        winners.push(chooser.choose(&Compiled(compiler), &asked, || false).expect("bound"));
    }
    assert_eq!((&winners[0], &winners[1]), (&winners[2], &winners[3]));
    assert_ne!(winners[0], winners[1]);
}

/// Where no other kernel computes a problem, the one that does is the winner, and nothing is written.
#[test]
fn a_kernel_without_rivals_is_not_measured() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("tuned.json");
    let chooser = Chooser::default();
    let only = |job: &Job, _: &AtomicBool| Ok(vec![Tried { spec: job.bound.clone(), ms: None, error: None }]);
    chooser.tune_by(clean(), Duration::from_secs(60), path.clone(), only).expect("a thread");
    let first = bind(&chooser, &PROBLEM, None).expect("bound");
    let outcomes = chooser.finish_tuning();
    assert_eq!(outcomes.len(), 1, "{outcomes:?}");
    assert!(outcomes[0].winner.as_ref() == Some(&first) && outcomes[0].error.is_none());
    assert!(!path.exists(), "nothing was measured");
}

/// A bind in a capture serves the planner's kernel and begins nothing; the next one does.
#[test]
fn nothing_begins_in_a_capture() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let chooser = tuning(&folder.path().join("tuned.json"));
    let asked = Asked::of(&PROBLEM, Pass::Forward);
    let planned = bind(&Chooser::default(), &PROBLEM, None).expect("bound");
    assert_eq!(chooser.choose(&clean(), &asked, || true).expect("bound"), planned);
    assert!(chooser.finish_tuning().is_empty(), "in a capture");
    chooser.choose(&clean(), &asked, || false).expect("bound");
    assert_eq!(chooser.finish_tuning().len(), 1, "after it");
}
