//! Predictions and measurements: does the cost model rank kernels as the GPU does?

use fa_attn::tune::TuneKey;
use fa_core::{Family, KernelSpec, Pass, Problem};
use fa_planner::cost::rank_correlation;
use serde::Serialize;

use crate::record::Provenance;
use crate::runner::Turns;

use super::measured::Measured;
use super::wanted::Wanted;

/// The planner's first choice should be within this factor of the best measured for nine problems in ten,
pub const NEAR: f64 = 1.03;

/// and within this factor for all.
const FAR: f64 = 1.08;

/// A run of `fa tune`.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The machine, the program and the compiler.
    #[serde(flatten)]
    pub provenance: Provenance,
    /// Launches of each kernel that counted.
    pub reps: usize,
    /// The seed that the problems were drawn by, where they were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// By problem.
    pub problems: Vec<OfProblem>,
    /// Mean of the problems' rank correlations.
    pub mean_rank_correlation: Option<f64>,
    /// Rank correlation over all kernels and problems, of predicted and measured rate.
    pub overall_rank_correlation: Option<f64>,
    /// Problems whose first choice is within 3 % of the best.
    pub first_choice_near: usize,
    /// The first choices of all problems.
    pub distribution: Distribution,
    /// Those of drawn problems with an even and an odd number: constants are fitted to one half and judged by
    /// the other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub halves: Option<Halves>,
}

/// How far first choices are behind the best measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Distribution {
    /// Problems whose first choice was measured.
    pub problems: usize,
    /// Share of them within 3 % of the best, by time.
    pub within_3_percent: Option<f64>,
    /// Share of them within 8 %.
    pub within_8_percent: Option<f64>,
    /// The lowest rate of a first choice over that of the best.
    pub worst: Option<f64>,
    /// The geometric mean of these.
    pub geometric_mean: Option<f64>,
    /// Mean of the problems' rank correlations.
    pub mean_rank_correlation: Option<f64>,
}

/// The two halves of drawn problems.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Halves {
    /// Even numbers.
    pub even: Distribution,
    /// Odd numbers.
    pub odd: Distribution,
}

impl Distribution {
    fn of<'a>(problems: impl Iterator<Item = &'a OfProblem> + Clone) -> Distribution {
        let ratios = problems.clone().filter_map(|p| p.first_choice_over_best).collect();
        Distribution::of_ratios(ratios, &problems.filter_map(|p| p.rank_correlation).collect::<Vec<f64>>())
    }

    /// Of first choices whose times over the best's are `ratios`.
    pub(super) fn of_ratios(ratios: Vec<f64>, correlations: &[f64]) -> Distribution {
        let share = |most: f64| {
            let within = ratios.iter().filter(|ratio| **ratio <= most).count();
            (!ratios.is_empty()).then(|| within as f64 / ratios.len() as f64)
        };
        let logs: Vec<f64> = ratios.iter().map(|ratio| -ratio.ln()).collect();
        Distribution {
            problems: ratios.len(),
            within_3_percent: share(NEAR),
            within_8_percent: share(FAR),
            worst: ratios.iter().copied().max_by(f64::total_cmp).map(f64::recip),
            geometric_mean: mean(&logs).map(f64::exp),
            mean_rank_correlation: mean(correlations),
        }
    }
}

/// The mean; `None` of nothing.
fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The measurements for one problem.
#[derive(Debug, Serialize)]
pub struct OfProblem {
    /// Its number among those of the run, from 0.
    pub number: usize,
    /// The problem.
    pub problem: Problem,
    /// `fwd` or `bwd`.
    pub kind: &'static str,
    /// Whether gradients have the same bits in every run.
    pub deterministic: bool,
    /// The family of kernels that were tried.
    pub family: Option<Family>,
    /// Its key in the table of winners.
    pub key: TuneKey,
    /// The fastest kernel.
    pub winner: Option<String>,
    /// TFLOP/s at the median.
    pub tflops: Option<f64>,
    /// The planner's first choice that compiles cleanly.
    pub first_choice: Option<String>,
    /// Its time over the winner's.
    pub first_choice_over_best: Option<f64>,
    /// Its rate over the winner's.
    pub first_choice_rate: Option<f64>,
    /// Spearman's, of predicted and measured time.
    pub rank_correlation: Option<f64>,
    /// The kernels that were tried.
    pub kernels: Vec<OfKernel>,
}

/// The measurement of one kernel.
#[derive(Debug, Serialize)]
pub struct OfKernel {
    /// The kernel's short name.
    pub name: String,
    /// The kernel.
    pub spec: KernelSpec,
    /// Hash of the kernel's sources.
    pub sources: String,
    /// Its position in the planner's order, from 0.
    pub rank: Option<usize>,
    /// Predicted milliseconds.
    pub predicted_ms: f64,
    /// Median milliseconds of a launch.
    pub ms: Option<f64>,
    /// The same measured again, of the fastest and of the planner's first choice: what these are compared by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub again_ms: Option<f64>,
    /// The error, if nothing was timed or the result is wrong.
    pub error: Option<String>,
}

impl Report {
    /// The report of all problems, which were drawn by `seed` if there is one.
    pub fn new(provenance: Provenance, turns: Turns, seed: Option<u64>, results: &[Measured]) -> Report {
        let problems: Vec<OfProblem> = results.iter().enumerate().map(of_problem).collect();
        let rates = |(measured, p): (&Measured, &OfProblem)| -> Vec<(f64, f64)> {
            let flops = p.problem.flops(measured.wanted.pass);
            p.kernels.iter().filter_map(|k| Some((flops / k.predicted_ms, flops / k.ms?))).collect()
        };
        let all: Vec<(f64, f64)> = results.iter().zip(&problems).flat_map(rates).collect();
        let half = |odd: usize| Distribution::of(problems.iter().filter(move |p| p.number % 2 == odd));
        let distribution = Distribution::of(problems.iter());
        Report {
            provenance,
            reps: turns.rounds * turns.reps,
            seed,
            mean_rank_correlation: distribution.mean_rank_correlation,
            overall_rank_correlation: rank_correlation(&all),
            first_choice_near: problems
                .iter()
                .filter(|p| p.first_choice_over_best.is_some_and(|ratio| ratio <= NEAR))
                .count(),
            distribution,
            halves: seed.map(|_| Halves { even: half(0), odd: half(1) }),
            problems,
        }
    }

    /// Whether a kernel was found for every problem.
    pub fn all_have_winners(&self) -> bool {
        self.problems.iter().all(|problem| problem.winner.is_some())
    }
}

fn of_problem((number, result): (usize, &Measured)) -> OfProblem {
    let Wanted { problem, family, pass } = result.wanted;
    let best = result.best();
    let pairs: Vec<(f64, f64)> = result
        .candidates
        .iter()
        .zip(&result.found)
        .filter_map(|(candidate, found)| Some((candidate.predicted_ms, found.ms?)))
        .collect();
    let listed = result.candidates.iter().enumerate().filter(|(_, candidate)| candidate.rank.is_some());
    let first = listed
        .filter_map(|(index, candidate)| Some((candidate, result.ms(index)?)))
        .min_by_key(|(candidate, _)| candidate.rank);
    let ratio = first.zip(best).map(|((_, ms), (_, best))| ms / best);
    OfProblem {
        number,
        problem,
        kind: pass.short_name(),
        deterministic: pass == Pass::Backward { deterministic: true },
        family,
        key: TuneKey::of(&problem),
        winner: best.map(|(spec, _)| spec.to_string()),
        tflops: best.map(|(_, ms)| problem.flops(pass) / (ms * 1e9)),
        first_choice: first.map(|(candidate, _)| candidate.spec.to_string()),
        first_choice_over_best: ratio,
        first_choice_rate: ratio.map(f64::recip),
        rank_correlation: rank_correlation(&pairs),
        kernels: result
            .candidates
            .iter()
            .zip(&result.found)
            .map(|(candidate, found)| OfKernel {
                name: candidate.spec.to_string(),
                spec: candidate.spec.clone(),
                sources: found.sources.clone(),
                rank: candidate.rank,
                predicted_ms: candidate.predicted_ms,
                ms: found.ms,
                again_ms: found.again_ms,
                error: found.error.clone(),
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use fa_core::{Arch, Dtype, Mask};

    use super::super::candidates;
    use super::super::measured::Outcome;
    use super::*;

    /// Problem `number`, whose first choice takes `ratio` of the time of the best.
    fn measured(number: usize, ratio: f64) -> OfProblem {
        let problem = Problem::square(1, 1024, 8, 64, Mask::CAUSAL, Dtype::F16);
        let wanted = Wanted { problem, family: Some(Family::Sm90), pass: Pass::Forward };
        let candidates =
            candidates::of(&problem, Arch::Sm90, Family::Sm90, Pass::Forward, 2).expect("there are plans");
        let ms = |index: usize| if index == 0 { ratio } else { 1.0 };
        let outcome = |index| Outcome { ms: Some(ms(index)), ..Outcome::default() };
        let found = (0..candidates.len()).map(outcome).collect();
        of_problem((number, &Measured { wanted, candidates, found }))
    }

    #[test]
    fn the_distribution_counts_what_is_near_and_knows_the_worst() {
        let problems = [measured(0, 1.0), measured(1, 1.25), measured(2, 1.05), measured(3, 1.02)];
        let all = Distribution::of(problems.iter());
        assert_eq!((all.problems, all.within_3_percent, all.within_8_percent), (4, Some(0.5), Some(0.75)));
        assert_eq!(all.worst, Some(0.8));
        assert_eq!(problems[1].first_choice_rate, Some(0.8));
        let even = Distribution::of(problems.iter().filter(|p| p.number % 2 == 0));
        assert_eq!((even.within_3_percent, even.within_8_percent), (Some(0.5), Some(1.0)));
        let none = Distribution::of(problems[..0].iter());
        assert_eq!(none, Distribution::default());
    }
}
