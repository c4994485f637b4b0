//! The report of the ladders.

use fa_core::{Arch, Family, KernelSpec};
use serde::Serialize;

use crate::error::Result;
use crate::record::{KernelRecord, Provenance};
use crate::runner::{Outcome, Times, Turns};
use crate::shape::Shape;

use super::rungs::{Ladder, Rung};

/// A run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The machine, the program and the compiler.
    #[serde(flatten)]
    pub provenance: Provenance,
    /// The kernels' family.
    #[serde(skip)]
    pub family: Family,
    /// Launches of each kernel that counted.
    pub reps: usize,
    /// The hash of the steps' kernels, as of `steps_digest`.
    pub steps_digest: String,
    /// The kernels that ran.
    pub kernels: Vec<KernelRecord>,
    /// What was measured.
    pub rows: Vec<Row>,
}

/// One step on one shape.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The ladder.
    pub ladder: String,
    /// The step.
    pub step: String,
    /// What changed, for people.
    pub change: &'static str,
    /// The problem's shape.
    #[serde(flatten)]
    pub shape: Shape,
    /// The kernel that ran; of several the fastest.
    pub spec: Option<String>,
    /// Median milliseconds of a launch.
    pub ms_median: Option<f64>,
    /// TFLOP/s at the median.
    pub tflops: Option<f64>,
    /// Our rate over that of the first step.
    pub ratio: Option<f64>,
    /// The same for the published ladder.
    pub published_ratio: Option<f64>,
    /// Why nothing was timed, or what is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Whether a kernel of this step gave a wrong result.
    pub wrong: bool,
}

/// The rows of a ladder; `timed` are (step, kernel, milliseconds), of which the fastest of a step counts.
pub fn rows(
    ladder: &Ladder,
    timed: &[(usize, &KernelSpec, f64)],
    errors: &[Option<String>],
    wrong: &[bool],
) -> Vec<Row> {
    let p = &ladder.problem;
    let fastest = |step: usize| {
        let own = timed.iter().filter(|(index, ..)| *index == step);
        own.min_by(|a, b| a.2.total_cmp(&b.2)).map(|(_, spec, ms)| (spec.to_string(), *ms))
    };
    let first = fastest(0).map(|(_, ms)| ms);
    let published_first = ladder.published.first().copied().flatten();
    let row = |(index, step): (usize, &Rung)| {
        let found = fastest(index);
        let ms = found.as_ref().map(|(_, ms)| *ms);
        let published = ladder.published.get(index).copied().flatten();
        Row {
            ladder: ladder.name.clone(),
            step: step.name.clone(),
            change: step.change,
            shape: Shape::from(p),
            spec: found.map(|(spec, _)| spec),
            ms_median: ms,
            tflops: ms.map(|ms| p.flops_forward() / (ms * 1e9)),
            ratio: first.zip(ms).map(|(first, ms)| first / ms),
            published_ratio: published_first.zip(published).map(|(first, rate)| rate / first),
            error: errors[index].clone().filter(|_| ms.is_none() || wrong[index]),
            wrong: wrong[index],
        }
    };
    ladder.steps.iter().enumerate().map(row).collect()
}

/// The row of a ladder's peer, after `rows` of its steps.
pub(super) fn peer_row(ladder: &Ladder, outcome: &Outcome, rows: &[Row]) -> Option<Row> {
    let (name, published) = ladder.peer?;
    let ms = outcome.peers.get(name).map(Times::median);
    let first = rows.first().and_then(|row| row.ms_median);
    let why = || outcome.peer_errors.get(name).cloned().unwrap_or_else(|| "not asked: --peers".to_owned());
    Some(Row {
        ladder: ladder.name.clone(),
        step: format!("{name} of torch"),
        change: "another library's kernel",
        shape: Shape::from(&ladder.problem),
        spec: None,
        ms_median: ms,
        tflops: ms.map(|ms| ladder.problem.flops_forward() / (ms * 1e9)),
        ratio: first.zip(ms).map(|(first, ms)| first / ms),
        published_ratio: ladder.published.first().copied().flatten().map(|first| published / first),
        error: if ms.is_some() { None } else { Some(why()) },
        wrong: false,
    })
}

impl Report {
    /// An empty one.
    pub fn new(provenance: Provenance, family: Family, turns: Turns, steps_digest: String) -> Report {
        let reps = turns.rounds * turns.reps;
        Report { provenance, family, reps, steps_digest, kernels: Vec::new(), rows: Vec::new() }
    }

    /// Notes a kernel that was run.
    ///
    /// # Errors
    /// An invalid spec.
    pub fn add_kernel(&mut self, spec: &KernelSpec, arch: Arch) -> Result<()> {
        KernelRecord::add(&mut self.kernels, spec, arch)
    }
}
