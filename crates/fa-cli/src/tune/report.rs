//! Predictions beside measurements: does the cost model rank kernels as the GPU does?

use fa_attn::tune::TuneKey;
use fa_core::{KernelSpec, Pass, Problem};
use fa_planner::cost::rank_correlation;
use serde::Serialize;

use crate::contest::Turns;
use crate::record::Provenance;
use crate::shape::head_dims;
use crate::term::output;

use super::measured::Measured;

/// The planner's first choice is to be within this of the best measured.
const NEAR: f64 = 1.03;

/// A run of `fa tune`.
#[derive(Debug, Serialize)]
pub struct Report {
    #[serde(flatten)]
    provenance: Provenance,
    /// Launches of each kernel that counted.
    reps: usize,
    problems: Vec<OfProblem>,
    /// Mean of the problems' rank correlations.
    mean_rank_correlation: Option<f64>,
    /// Rank correlation over all kernels and problems, of predicted and measured rate.
    overall_rank_correlation: Option<f64>,
    /// Problems whose first choice is within 3 % of the best.
    first_choice_near: usize,
}

#[derive(Debug, Serialize)]
struct OfProblem {
    problem: Problem,
    key: TuneKey,
    winner: Option<String>,
    tflops: Option<f64>,
    /// The planner's first choice that compiles cleanly.
    first_choice: Option<String>,
    /// Its time over the winner's.
    first_choice_over_best: Option<f64>,
    /// Spearman's, of predicted and measured time.
    rank_correlation: Option<f64>,
    kernels: Vec<OfKernel>,
}

#[derive(Debug, Serialize)]
struct OfKernel {
    name: String,
    spec: KernelSpec,
    sources: String,
    rank: Option<usize>,
    predicted_ms: f64,
    ms: Option<f64>,
    error: Option<String>,
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

    fn rows(&self) -> Vec<[String; 10]> {
        let number =
            |value: Option<f64>, digits: usize| value.map_or("-".into(), |x| format!("{x:.digits$}"));
        let row = |p: &OfProblem| {
            let problem = &p.problem;
            let bad = p.kernels.iter().filter(|kernel| kernel.error.is_some()).count();
            [
                head_dims(problem),
                problem.mask.to_string(),
                problem.types.qkv.to_string(),
                format!("{}x{}x{}", problem.lengths.sequences(), problem.heads_q, problem.lengths.max_k()),
                p.winner.clone().unwrap_or_else(|| "-".into()),
                number(p.tflops, 0),
                p.first_choice.clone().unwrap_or_else(|| "-".into()),
                number(p.first_choice_over_best, 3),
                number(p.rank_correlation, 2),
                format!("{} ({bad})", p.kernels.len()),
            ]
        };
        self.problems.iter().map(row).collect()
    }

    const HEADER: [&'static str; 10] = [
        "hd",
        "mask",
        "dtype",
        "B x H x N",
        "winner",
        "TFLOP/s",
        "first choice",
        "its time over best",
        "rank corr.",
        "tried (bad)",
    ];

    fn summary(&self) -> String {
        let number = |value: Option<f64>| value.map_or("-".into(), |x| format!("{x:.3}"));
        format!(
            "Rank correlation of prediction and measurement: {} in the mean over problems, {} over everything. The \
             planner's first choice is within 3 % of the best for {} of {} problems.\n",
            number(self.mean_rank_correlation),
            number(self.overall_rank_correlation),
            self.first_choice_near,
            self.problems.len()
        )
    }

    /// For a terminal.
    pub fn table(&self) -> String {
        let mut table = output::table(&Report::HEADER);
        self.rows().into_iter().for_each(|row| {
            table.add_row(row);
        });
        format!("{}{}", output::table_text(&table), self.summary())
    }

    /// For a document.
    pub fn markdown(&self) -> String {
        let Provenance { device, compiler, commit, command, date, .. } = &self.provenance;
        let driver = device.driver.as_deref().unwrap_or("unknown");
        let mut text = format!(
            "# Tuning on {}\n\n`{command}`, {date}, commit {commit}, driver {driver}, {compiler}; medians of {} launches, \
             kernels of a problem in turns.\n\n{}\n",
            device.gpu,
            self.reps,
            self.summary()
        );
        text += &format!("| {} |\n|{}\n", Report::HEADER.join(" | "), "---|".repeat(Report::HEADER.len()));
        for row in self.rows() {
            text += &format!("| {} |\n", row.join(" | "));
        }
        text
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
