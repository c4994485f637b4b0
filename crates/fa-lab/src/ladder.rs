//! The gain of each optimisation step on this GPU.

mod families;
mod figures;
pub mod profile;
pub mod published;
pub mod report;
mod rungs;
mod sm80;
mod sm90;

use fa_attn::device::{Bound, Gpu, Half};
use fa_core::{Family, KernelSpec, Problem};
use rayon::prelude::*;

use crate::device;
use crate::error::Result;
use crate::peers::Peers;
use crate::progress::{Progress, Step};
use crate::record::{Provenance, without_logs};
use crate::runner::{Runner, Turns};
use crate::shape::HeadDim;
use crate::tensors::with_half;

use report::{Report, Row};
use rungs::Ladder;

pub use families::steps_digest;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Options {
    /// The kernels whose steps are measured.
    pub family: Family,
    /// Sequence lengths; where there are none, 1k to 16k for SM80 and 4096 for SM90.
    pub seqlens: Vec<usize>,
    /// Head dims of the SM90 kernels; where there are none, 128. The SM80 ladder has head dim 128, as
    /// published.
    pub head_dims: Vec<HeadDim>,
    /// How often each step runs.
    pub turns: Turns,
    /// Whether the peer of a ladder that has one is timed beside its steps.
    pub peers: bool,
}

/// Measures every step of every ladder; a step that cannot run has the reason in its row.
///
/// # Errors
/// No usable GPU, a family that it does not run, and what the GPU reports.
pub fn run(options: &Options, progress: &mut Progress<'_>) -> Result<Report> {
    let gpu = device::open()?;
    let arch = gpu.arch();
    let ladders = families::ladders(options.family, arch, &options.head_dims, &options.seqlens)?;
    let specs: Vec<(&Problem, &KernelSpec)> = ladders
        .iter()
        .flat_map(|ladder| ladder.steps.iter().map(move |step| (&ladder.problem, step)))
        .flat_map(|(problem, step)| step.specs.iter().flatten().map(move |spec| (problem, spec)))
        .collect();
    // Compiled in parallel, a second or so each; errors are reported when the kernels are bound below.
    let bind = |problem: &Problem, spec: &KernelSpec| {
        Bound::of(&gpu.kernels, problem, &gpu.launch_plan(problem, spec, None))
    };
    specs.par_iter().for_each(|(problem, spec)| drop(bind(problem, spec)));
    let mut peers = options.peers.then(Peers::start).transpose()?;
    let digest = families::digest(&ladders, arch)?;
    let mut report = Report::new(Provenance::new(&gpu)?, options.family, options.turns, digest);
    progress(Step::Total(ladders.len()));
    for ladder in &ladders {
        progress(Step::Begin(format!("{}, N {}", ladder.name, ladder.problem.lengths.max_k())));
        let rows = with_half!(
            ladder.problem.types.q,
            T => measure::<T>(&gpu, ladder, options.turns, peers.as_mut(), &mut report),
            else unreachable!("ladders are of 16-bit types")
        )?;
        report.rows.extend(rows);
        progress(Step::Done);
    }
    Ok(report)
}

/// Measures the steps of one ladder, all in turns.
fn measure<T: Half>(
    gpu: &Gpu,
    ladder: &Ladder,
    turns: Turns,
    peers: Option<&mut Peers>,
    report: &mut Report,
) -> Result<Vec<Row>> {
    let problem = &ladder.problem;
    let mut runner: Option<Runner<'_, T>> = None;
    let mut bound: Vec<(usize, Bound)> = Vec::new();
    let mut errors: Vec<Option<String>> = vec![None; ladder.steps.len()];
    let mut wrong = vec![false; ladder.steps.len()];
    for (index, step) in ladder.steps.iter().enumerate() {
        let specs = match &step.specs {
            Ok(specs) => specs,
            Err(why) => {
                errors[index] = Some(why.clone());
                continue;
            }
        };
        for spec in specs {
            let forward = match Bound::of(&gpu.kernels, problem, &gpu.launch_plan(problem, spec, None)) {
                Ok(forward) => forward,
                Err(error) => {
                    errors[index] = Some(without_logs(&error.to_string()));
                    continue;
                }
            };
            let runner = match &mut runner {
                Some(runner) => runner,
                None => runner.insert(Runner::new(gpu, problem, &forward)?),
            };
            let judged = runner.check(&forward)?;
            if judged.passed {
                report.add_kernel(spec, gpu.arch())?;
                bound.push((index, forward));
            } else {
                wrong[index] = true;
                errors[index] =
                    Some(format!("wrong: off by {:.2e} of {:.2e}", judged.max_abs, judged.tolerance));
            }
        }
    }
    let Some(mut runner) = runner else {
        return Ok(report::rows(ladder, &[], &errors, &wrong));
    };
    let (indices, forwards): (Vec<usize>, Vec<Bound>) = bound.into_iter().unzip();
    let wanted: Vec<String> = ladder.peer.iter().map(|(name, _)| (*name).to_owned()).collect();
    let peers = peers.filter(|_| !wanted.is_empty()).map(|peers| (peers, wanted.as_slice()));
    let outcome = runner.run(&forwards, peers, turns)?;
    let timed: Vec<(usize, &KernelSpec, f64)> = indices
        .iter()
        .zip(&forwards)
        .zip(&outcome.ours)
        .map(|((&index, forward), times)| (index, forward.spec(), times.median()))
        .collect();
    let mut rows = report::rows(ladder, &timed, &errors, &wrong);
    rows.extend(report::peer_row(ladder, &outcome, &rows));
    Ok(rows)
}
