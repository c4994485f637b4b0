//! The process that measures: it gets a problem and kernels, and announces each kernel before running it.

use fa_attn::device::{Bound, Gpu, Half};
use fa_core::{KernelSpec, Problem};
use serde::{Deserialize, Serialize};

use crate::device::{self, bind_spec};
use crate::error::{Error, Result};
use crate::record::without_logs;
use crate::runner::{Runner, Turns};
use crate::tensors::with_half;
use crate::worker::say;

/// What a worker measures.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub problem: Problem,
    pub specs: Vec<KernelSpec>,
    /// The first of these that is right is measured again, however slow: the planner's choice.
    pub ranked: Vec<usize>,
    pub turns: Turns,
}

/// Its messages, a line of JSON each.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Event {
    /// This kernel starts: the loss of the worker is its fault from now on.
    Begin(usize),
    /// This kernel cannot be used.
    Bad(usize, String),
    /// Median milliseconds of the fastest, measured again.
    Again(Vec<(usize, f64)>),
    /// Median milliseconds of every kernel that is not bad.
    Times(Vec<(usize, f64)>),
}

/// The most kernels that are measured again.
const FINALISTS: usize = 5;

/// Kernels within this factor of the fastest are measured again.
const CLOSE: f64 = 1.05;

/// Turns of a finalist per turn of the first measurement.
const AGAIN: usize = 3;

/// The kernels to measure again, by number: the fastest of `times`, and `first`. The least of many medians is
/// biased by luck; a second measurement is not.
fn finalists(times: &[(usize, f64)], first: Option<usize>) -> Vec<usize> {
    let mut order = times.to_vec();
    order.sort_by(|a, b| a.1.total_cmp(&b.1));
    let least = order.first().map_or(f64::INFINITY, |(_, ms)| *ms);
    let mut chosen: Vec<usize> = order
        .iter()
        .take_while(|(_, ms)| *ms <= least * CLOSE)
        .take(FINALISTS)
        .map(|(index, _)| *index)
        .collect();
    chosen.extend(first.filter(|first| !chosen.contains(first)));
    chosen
}

/// Measures the kernels of a job: the whole life of the worker.
///
/// # Errors
/// What the GPU reports.
pub(crate) fn work(job: &Job) -> Result<()> {
    let gpu = device::open()?;
    with_half!(
        job.problem.types.q,
        T => measure::<T>(&gpu, job),
        else Err(Error::Request(format!("no GPU kernel computes in {}", job.problem.types.q)))
    )
}

fn measure<T: Half>(gpu: &Gpu, job: &Job) -> Result<()> {
    let mut runner: Option<Runner<'_, T>> = None;
    let mut good: Vec<(usize, Bound)> = Vec::new();
    for (index, spec) in job.specs.iter().enumerate() {
        say(&Event::Begin(index))?;
        let bound = match bind_spec(gpu, &job.problem, spec, None, spec.kernel.pass()) {
            Ok(bound) => bound,
            Err(error) => {
                say(&Event::Bad(index, without_logs(&error.to_string())))?;
                continue;
            }
        };
        let runner = match &mut runner {
            Some(runner) => runner,
            None => runner.insert(Runner::new(gpu, &job.problem, &bound)?),
        };
        let judged = runner.check(&bound)?;
        if judged.passed {
            good.push((index, bound));
        } else {
            let why = format!(
                "wrong: off by {:.3e} (tolerance {:.3e}), or not all written",
                judged.max_abs, judged.tolerance
            );
            say(&Event::Bad(index, why))?;
        }
    }
    let Some(mut runner) = runner else { return say(&Event::Times(Vec::new())) };
    let (indices, bound): (Vec<usize>, Vec<Bound>) = good.into_iter().unzip();
    let outcome = runner.run(&bound, None, job.turns)?;
    let medians = outcome.ours.iter().map(|times| times.median());
    let times: Vec<(usize, f64)> = indices.iter().copied().zip(medians).collect();
    let first = job.ranked.iter().copied().find(|index| indices.contains(index));
    let again = finalists(&times, first);
    let kept = |index: &usize| again.contains(index);
    let bound: Vec<Bound> =
        indices.iter().zip(bound).filter(|(index, _)| kept(index)).map(|(_, bound)| bound).collect();
    let turns = Turns { rounds: AGAIN * job.turns.rounds, ..job.turns };
    let outcome = runner.run(&bound, None, turns)?;
    let medians = outcome.ours.iter().map(|times| times.median());
    say(&Event::Again(indices.into_iter().filter(kept).zip(medians).collect()))?;
    say(&Event::Times(times))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_and_the_planners_choice_are_measured_again() {
        let times = |ms: &[f64]| ms.iter().copied().enumerate().collect::<Vec<_>>();
        assert_eq!(finalists(&times(&[1.2, 1.0, 1.04, 1.06]), Some(0)), [1, 2, 0]);
        assert_eq!(finalists(&times(&[1.0, 1.01]), Some(0)), [0, 1]);
        assert_eq!(finalists(&times(&[1.0, 1.01, 1.02, 1.03, 1.04, 1.045]), Some(5)), [0, 1, 2, 3, 4, 5]);
        assert_eq!(finalists(&times(&[2.0]), None), [0]);
        assert!(finalists(&[], None).is_empty());
    }
}
