//! The outcomes of searches.

use fa_core::{Family, KernelSpec, Pass, Problem};

use crate::error::Error;

/// The outcome of one candidate.
#[derive(Clone, Debug, PartialEq)]
pub struct Tried {
    /// The kernel.
    pub spec: KernelSpec,
    /// Milliseconds of a launch (of all launches of a backward), the fastest sample.
    pub ms: Option<f64>,
    /// Why it was skipped; `None` without a time where the budget ended before its turn.
    pub error: Option<String>,
}

/// The outcome of the search for one problem.
#[derive(Debug)]
pub struct TuningOutcome {
    /// The problem.
    pub problem: Problem,
    /// Its pass.
    pub pass: Pass,
    /// The family of kernels that was tried.
    pub family: Family,
    /// The candidates, the bound kernel first.
    pub tried: Vec<Tried>,
    /// The kernel that is used from the next bind on.
    pub winner: Option<KernelSpec>,
    /// Why there is no winner, or why it is not on disk.
    pub error: Option<Error>,
}
