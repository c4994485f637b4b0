//! Predictions and measurements: does the cost model rank kernels as the GPU does?

use fa_attn::tune::TuneKey;
use fa_core::{KernelSpec, Pass, Problem};
use fa_planner::cost::rank_correlation;
use serde::Serialize;

use crate::record::Provenance;
use crate::runner::Turns;

use super::measured::Measured;

/// The planner's first choice is to be within this of the best measured.
const NEAR: f64 = 1.03;

/// A run of `fa tune`.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The machine, the program and the compiler.
    #[serde(flatten)]
    pub provenance: Provenance,
    /// Launches of each kernel that counted.
    pub reps: usize,
    /// By problem.
    pub problems: Vec<OfProblem>,
    /// Mean of the problems' rank correlations.
    pub mean_rank_correlation: Option<f64>,
    /// Rank correlation over all kernels and problems, of predicted and measured rate.
    pub overall_rank_correlation: Option<f64>,
    /// Problems whose first choice is within 3 % of the best.
    pub first_choice_near: usize,
}

/// What was measured for one problem.
#[derive(Debug, Serialize)]
pub struct OfProblem {
    /// The problem.
    pub problem: Problem,
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
    /// Spearman's, of predicted and measured time.
    pub rank_correlation: Option<f64>,
    /// The kernels that were tried.
    pub kernels: Vec<OfKernel>,
}

/// What became of one kernel.
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
    /// Why nothing was timed, or what is wrong.
    pub error: Option<String>,
}

impl Report {
    /// Of all problems.
    pub fn new(provenance: Provenance, turns: Turns, pass: Pass, results: &[Measured]) -> Report {
        let problems: Vec<OfProblem> = results.iter().map(|result| of_problem(result, pass)).collect();
        let correlations: Vec<f64> = problems.iter().filter_map(|p| p.rank_correlation).collect();
        let mean = correlations.iter().sum::<f64>() / correlations.len().max(1) as f64;
        let rates = |p: &OfProblem| -> Vec<(f64, f64)> {
            let flops = p.problem.flops(pass);
            p.kernels.iter().filter_map(|k| Some((flops / k.predicted_ms, flops / k.ms?))).collect()
        };
        let all: Vec<(f64, f64)> = problems.iter().flat_map(rates).collect();
        Report {
            provenance,
            reps: turns.rounds * turns.reps,
            mean_rank_correlation: (!correlations.is_empty()).then_some(mean),
            overall_rank_correlation: rank_correlation(&all),
            first_choice_near: problems
                .iter()
                .filter(|p| p.first_choice_over_best.is_some_and(|ratio| ratio <= NEAR))
                .count(),
            problems,
        }
    }

    /// Whether a kernel was found for every problem.
    pub fn all_have_winners(&self) -> bool {
        self.problems.iter().all(|problem| problem.winner.is_some())
    }
}

fn of_problem(result: &Measured, pass: Pass) -> OfProblem {
    let problem = result.problem;
    let best = result.best();
    let pairs: Vec<(f64, f64)> = result
        .candidates
        .iter()
        .zip(&result.found)
        .filter_map(|(candidate, found)| Some((candidate.predicted_ms, found.ms?)))
        .collect();
    let listed =
        result.candidates.iter().zip(&result.found).filter(|(candidate, _)| candidate.rank.is_some());
    let first =
        listed.filter_map(|(candidate, found)| Some((candidate, found.ms?))).min_by_key(|(c, _)| c.rank);
    OfProblem {
        problem,
        key: TuneKey::of(&problem),
        winner: best.map(|(spec, _)| spec.to_string()),
        tflops: best.map(|(_, ms)| problem.flops(pass) / (ms * 1e9)),
        first_choice: first.map(|(candidate, _)| candidate.spec.to_string()),
        first_choice_over_best: first.zip(best).map(|((_, ms), (_, best))| ms / best),
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
                error: found.error.clone(),
            })
            .collect(),
    }
}
