//! The process that measures: it gets a problem and kernels, and says what it does before it does it.

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
    pub turns: Turns,
}

/// What it says, a line of JSON each.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Event {
    /// This kernel runs from now on; a worker that is lost now was lost to it.
    Begin(usize),
    /// This kernel cannot be used.
    Bad(usize, String),
    /// Median milliseconds of every kernel that is not bad.
    Times(Vec<(usize, f64)>),
}

/// Measures the kernels of a job: the worker's whole life.
///
/// # Errors
/// What the GPU reports.
pub(crate) fn work(job: &Job) -> Result<()> {
    let gpu = device::open()?;
    with_half!(
        job.problem.types.qkv,
        T => measure::<T>(&gpu, job),
        else Err(Error::Request(format!("no GPU kernel computes in {}", job.problem.types.qkv)))
    )
}

fn measure<T: Half>(gpu: &Gpu, job: &Job) -> Result<()> {
    let mut runner: Option<Runner<'_, T>> = None;
    let mut good: Vec<(usize, Bound)> = Vec::new();
    for (index, spec) in job.specs.iter().enumerate() {
        say(&Event::Begin(index))?;
        let bound = match bind_spec(gpu, &job.problem, spec, spec.kernel.pass()) {
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
    let times = indices.into_iter().zip(outcome.ours.iter().map(|times| times.median())).collect();
    say(&Event::Times(times))
}
