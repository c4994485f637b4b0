//! The steps of a ladder.

use fa_core::{KernelSpec, Problem};

/// A kernel on the ladder.
#[derive(Clone, Debug)]
pub struct Rung {
    /// Its name.
    pub name: String,
    /// What changed, for people.
    pub change: &'static str,
    /// The kernels of the step: more than one where the fastest is to be chosen. None with the reason.
    pub specs: Result<Vec<KernelSpec>, String>,
}

/// Steps that are measured on the same shapes.
#[derive(Clone, Debug)]
pub struct Ladder {
    /// Its name.
    pub name: String,
    /// The shape.
    pub problem: Problem,
    /// The steps; the first is the baseline.
    pub steps: Vec<Rung>,
    /// Rates of a published ladder in TFLOP/s, by step; none for steps that it does not have.
    pub published: Vec<Option<f64>>,
    /// Another library's kernel on the same problem, and its published rate.
    pub peer: Option<(&'static str, f64)>,
}
