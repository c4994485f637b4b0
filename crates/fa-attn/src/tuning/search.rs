//! Which of a few kernels is the fastest, within a budget of time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fa_core::{Arch, Family, KernelSpec, Pass, Problem};
use fa_planner::plan::{PlanOptions, plan};

use crate::error::Error;

use super::outcome::Tried;

/// Samples of each candidate, at the most.
const ROUNDS: usize = 6;

/// The bound kernel stays unless another one is faster by this factor: less is within what samples scatter.
const GAIN: f64 = 1.02;

/// The budget is so many times what loading and timing may take; the rest is for compiling.
const MEASURED: u32 = 5;

/// What compiles and times kernels.
pub(crate) trait Bench {
    /// A kernel that is ready to be timed.
    type Ready;

    /// Time since the search began.
    fn elapsed(&self) -> Duration;

    /// Compiles the kernels of `specs` that the cache does not have, side by side, until all are or `stop` is
    /// set or the search has taken `budget`. What compiling says against one, [`Bench::ready`] says.
    fn compile(&mut self, specs: &[KernelSpec], budget: Duration, stop: &AtomicBool);

    /// Loads and binds.
    fn ready(&mut self, spec: &KernelSpec) -> Result<Self::Ready, Error>;

    /// Milliseconds of a launch.
    fn sample(&mut self, kernel: &mut Self::Ready) -> Result<f64, Error>;
}

/// The bound kernel, and the planner's best kernels of other tiles: `count` in all, where there are so many.
///
/// # Errors
/// [`Error::Plan`].
pub(crate) fn candidates(
    problem: &Problem,
    arch: Arch,
    (family, pass): (Family, Pass),
    bound: &KernelSpec,
    count: usize,
) -> Result<Vec<KernelSpec>, Error> {
    let options = PlanOptions::default().with_family(Some(family)).with_pass(pass);
    let mut found = vec![bound.clone()];
    let cta = |spec: &KernelSpec| (spec.tile(), spec.threads());
    for plan in plan(problem, arch, &options)? {
        if found.len() < count && found.iter().all(|known| cta(known) != cta(&plan.spec)) {
            found.push(plan.spec);
        }
    }
    Ok(found)
}

/// Tries `specs` in turns until each has its samples, the budget or the share of it for timing is spent, or
/// `stop` is set. One that fails is left out from then on.
pub(crate) fn search<B: Bench>(
    bench: &mut B,
    specs: &[KernelSpec],
    budget: Duration,
    stop: &AtomicBool,
) -> Vec<Tried> {
    let before = bench.elapsed();
    bench.compile(specs, budget, stop);
    // Compiling aside, so that a search whose kernels are in the cache is short.
    let limit = budget.min(budget / MEASURED + (bench.elapsed() - before));
    let over = |bench: &B| stop.load(Ordering::Relaxed) || bench.elapsed() >= limit;
    let mut tried: Vec<Tried> =
        specs.iter().map(|spec| Tried { spec: spec.clone(), ms: None, error: None }).collect();
    let mut live: Vec<(usize, B::Ready)> = Vec::new();
    for (index, spec) in specs.iter().enumerate() {
        if over(bench) {
            break;
        }
        // A sample at once: a budget that ends while the last ones compile has compared the first ones.
        let first = bench.ready(spec).and_then(|mut kernel| Ok((bench.sample(&mut kernel)?, kernel)));
        match first {
            Ok((ms, kernel)) => {
                tried[index].ms = Some(ms);
                live.push((index, kernel));
            }
            Err(error) => tried[index].error = Some(error.to_string()),
        }
    }
    for _ in 1..ROUNDS {
        live.retain_mut(|(index, kernel)| {
            if over(bench) {
                return true;
            }
            let tried = &mut tried[*index];
            match bench.sample(kernel) {
                Ok(ms) => tried.ms = Some(tried.ms.map_or(ms, |least| least.min(ms))),
                Err(error) => (tried.ms, tried.error) = (None, Some(error.to_string())),
            }
            tried.error.is_none()
        });
    }
    tried
}

/// The winner: the first of `tried` unless another one is clearly faster.
///
/// # Errors
/// [`Error::TuningBudget`] where fewer than two were measured though more would work.
pub(crate) fn winner(tried: &[Tried], budget: Duration) -> Result<&Tried, Error> {
    let measured = tried.iter().filter(|tried| tried.ms.is_some()).count();
    let untried = tried.iter().filter(|tried| tried.ms.is_none() && tried.error.is_none()).count();
    let ms = |tried: &Tried| tried.ms.unwrap_or(f64::INFINITY);
    let fastest = tried.iter().min_by(|a, b| ms(a).total_cmp(&ms(b)));
    match (fastest, tried.first()) {
        (Some(fastest), Some(bound)) if measured > 1 || (measured == 1 && untried == 0) => {
            Ok(if ms(fastest) * GAIN < ms(bound) { fastest } else { bound })
        }
        _ if untried == 0 => Err(Error::TuningFailed {
            why: tried.first().and_then(|bound| bound.error.clone()).unwrap_or_default(),
        }),
        _ => Err(Error::TuningBudget { budget, measured, candidates: tried.len() }),
    }
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask};

    use super::*;

    const PROBLEM: Problem = Problem::square(2, 4096, 16, 128, Mask::CAUSAL, Dtype::Bf16);

    /// Kernel `i` takes `ms[i]` (with up to 50 % on top in the first round), or fails to compile. Compiling
    /// takes `compile` seconds each, two side by side; loading and a sample a tenth.
    struct Fake {
        specs: Vec<KernelSpec>,
        ms: Vec<Option<f64>>,
        compile: f64,
        seconds: f64,
        samples: usize,
    }

    impl Bench for Fake {
        type Ready = usize;

        fn elapsed(&self) -> Duration {
            Duration::from_secs_f64(self.seconds)
        }

        fn compile(&mut self, specs: &[KernelSpec], budget: Duration, stop: &AtomicBool) {
            for _ in specs.chunks(2) {
                if !stop.load(Ordering::Relaxed) && self.elapsed() < budget {
                    self.seconds += self.compile;
                }
            }
        }

        fn ready(&mut self, spec: &KernelSpec) -> Result<usize, Error> {
            self.seconds += 0.1;
            let index = self.specs.iter().position(|known| known == spec).expect("one of them");
            let failed = || Error::TuningFailed { why: "it spills".to_owned() };
            self.ms[index].map(|_| index).ok_or_else(failed)
        }

        fn sample(&mut self, index: &mut usize) -> Result<f64, Error> {
            self.seconds += 0.1;
            self.samples += 1;
            let noise = if self.samples <= self.specs.len() && *index % 2 == 1 { 1.5 } else { 1.0 };
            Ok(self.ms[*index].expect("it was ready") * noise)
        }
    }

    fn fake(ms: &[Option<f64>]) -> Fake {
        let first = plan(&PROBLEM, Arch::Sm90, &PlanOptions::default()).expect("plans").swap_remove(0).spec;
        let kind = (Family::Sm90, Pass::Forward);
        let specs = candidates(&PROBLEM, Arch::Sm90, kind, &first, ms.len()).expect("there are plans");
        assert_eq!(specs.len(), ms.len());
        Fake { specs, ms: ms.to_vec(), compile: 1.0, seconds: 0.0, samples: 0 }
    }

    fn tried(fake: &mut Fake, seconds: f64) -> Vec<Tried> {
        let specs = fake.specs.clone();
        search(fake, &specs, Duration::from_secs_f64(seconds), &AtomicBool::new(false))
    }

    const BUDGET: Duration = Duration::from_secs(60);

    #[test]
    fn candidates_begin_with_the_bound_kernel_and_differ_in_their_tiles() {
        let plans = plan(&PROBLEM, Arch::Sm90, &PlanOptions::default()).expect("plans");
        let kind = (Family::Sm90, Pass::Forward);
        for bound in [&plans[0].spec, &plans[7].spec] {
            let found = candidates(&PROBLEM, Arch::Sm90, kind, bound, 4).expect("there are plans");
            assert_eq!((found.len(), &found[0]), (4, bound));
            for (index, spec) in found.iter().enumerate() {
                let same =
                    |other: &&KernelSpec| (other.tile(), other.threads()) == (spec.tile(), spec.threads());
                assert_eq!(found[..index].iter().find(same), None, "{spec} twice");
            }
        }
    }

    #[test]
    fn the_fastest_wins_by_its_best_sample_and_ties_stay_with_the_bound_kernel() {
        let mut bench = fake(&[Some(1.0), Some(0.9), Some(1.2)]);
        let all = tried(&mut bench, 60.0);
        assert_eq!(all.iter().map(|tried| tried.ms).collect::<Vec<_>>(), bench.ms);
        assert_eq!(winner(&all, BUDGET).expect("a winner").spec, bench.specs[1]);
        let mut bench = fake(&[Some(1.0), Some(0.99)]);
        let all = tried(&mut bench, 60.0);
        assert_eq!(winner(&all, BUDGET).expect("a winner").spec, bench.specs[0]);
    }

    #[test]
    fn a_failing_candidate_is_skipped_even_the_bound_one() {
        let mut bench = fake(&[None, Some(2.0), None, Some(1.0)]);
        let all = tried(&mut bench, 60.0);
        assert!(all[0].error.as_deref().is_some_and(|error| error.contains("it spills")));
        assert_eq!(winner(&all, BUDGET).expect("a winner").spec, bench.specs[3]);
        let mut bench = fake(&[Some(1.0), None]);
        assert_eq!(winner(&tried(&mut bench, 60.0), BUDGET).expect("it is alone").ms, Some(1.0));
        let error =
            winner(&tried(&mut fake(&[None, None]), 60.0), BUDGET).expect_err("none works").to_string();
        assert!(error.contains("it spills"), "{error}");
    }

    #[test]
    fn the_budget_holds_whatever_it_is() {
        for tenths in 1..=60 {
            let budget = f64::from(tenths) / 10.0;
            let mut bench = fake(&[Some(1.0), Some(0.5), Some(0.7), Some(0.8)]);
            let all = tried(&mut bench, budget);
            // What was begun before the end is finished: two kernels, one with its first sample, or a sample.
            assert!(bench.seconds < budget + 1.2 + 1e-6, "{budget}: {}", bench.seconds);
            let measured = all.iter().filter(|tried| tried.ms.is_some()).count();
            assert_eq!(winner(&all, Duration::from_secs_f64(budget)).is_ok(), measured > 1, "{budget}");
        }
        let all = tried(&mut fake(&[Some(1.0), Some(0.5)]), 0.5);
        let error = winner(&all, Duration::from_millis(500)).expect_err("no time").to_string();
        assert!(error.contains("500ms") && error.contains("0 of 2"), "{error}");
    }

    /// Of a budget of 5 s, kernels that are in the cache take the second that is for measuring, and those
    /// that are not what compiling takes beside it.
    #[test]
    fn a_warm_cache_takes_a_fifth_of_the_budget() {
        for (compile, seconds) in [(0.0, 1.0), (1.0, 3.0), (1.5, 4.0)] {
            let mut bench = fake(&[Some(1.0), Some(0.5), Some(0.7), Some(0.8)]);
            bench.compile = compile;
            let all = tried(&mut bench, 5.0);
            assert!(bench.seconds >= seconds - 1e-6 && bench.seconds < seconds + 0.2, "{}", bench.seconds);
            assert!(all.iter().all(|tried| tried.ms.is_some()), "{all:?}");
            assert_eq!(winner(&all, BUDGET).expect("a winner").spec, bench.specs[1]);
        }
    }

    #[test]
    fn a_search_stops_when_it_is_told() {
        let mut bench = fake(&[Some(1.0), Some(0.5)]);
        let specs = bench.specs.clone();
        let all = search(&mut bench, &specs, BUDGET, &AtomicBool::new(true));
        assert!(all.iter().all(|tried| tried.ms.is_none() && tried.error.is_none()));
        assert!(bench.seconds == 0.0);
    }
}
