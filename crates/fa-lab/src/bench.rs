//! Our kernels' rates on the GPU, and those of other libraries in the same run.

pub mod append;
mod change;
pub mod packed;
pub mod report;

use std::collections::BTreeMap;

use fa_attn::Tuning;
use fa_attn::device::{BindOptions, Bound, Gpu, Half};
use fa_core::{Family, KernelSpec, Pass, PinnedSpec, Problem};
use fa_planner::cost::MOST_DECODED;
use rayon::prelude::*;

use crate::device::bind_spec;
use crate::error::Result;
use crate::judge::sample_rows::Judged;
use crate::marks::Wanted;
use crate::peers::Peers;
use crate::progress::{Progress, Step};
use crate::record::{KernelRecord, Provenance, without_logs};
use crate::runner::{Outcome, Runner, Turns, run_together};
use crate::tensors::{with_drawn_rows, with_half};
use crate::tune::draw::Drawing;

pub use change::Change;
use report::{PeersRecord, Report, Row};

/// What is measured.
#[derive(Clone, Debug)]
pub struct Options {
    /// The shapes.
    pub shapes: Vec<Wanted>,
    /// The kernels; where there are none, the library's choice for each shape.
    pub specs: Vec<PinnedSpec>,
    /// Whether the library's choice is measured as well as the given kernels.
    pub beside_choice: bool,
    /// Changes of the library's choice, measured alternately with it for each shape.
    pub changes: Vec<Change>,
    /// The family that the library chooses from, even if another is faster here.
    pub family: Option<Family>,
    /// The pass.
    pub pass: Pass,
    /// Whether the library measures its best few kernels for each shape first, and keeps the winners.
    pub tune: bool,
    /// Whether other libraries are timed in the same run.
    pub peers: bool,
    /// Names of the peers that are asked; all, if empty.
    pub peer_names: Vec<String>,
    /// How often each kernel runs.
    pub turns: Turns,
}

/// Shapes drawn at random, of the family that is fastest on this GPU where none is named. A few queries are
/// decoding, whose rate is in bytes.
///
/// # Errors
/// No usable GPU, and what [`Drawing::draw`] refuses.
pub fn drawn(drawing: Drawing) -> Result<Vec<Wanted>> {
    let arch = Gpu::open()?.arch();
    let families = if drawing.families.is_empty() { vec![Family::native(arch)] } else { drawing.families };
    let drawn = Drawing { families, ..drawing }.draw(arch)?;
    let of = |problem: Problem| match is_decoding(&problem) {
        true => row_of(problem, "drawn, few queries"),
        false => row_of(problem, "drawn"),
    };
    Ok(drawn.into_iter().map(|drawn| of(drawn.problem)).collect())
}

/// Whether a problem's time is that of reading its keys: a forward of a few queries.
fn is_decoding(problem: &Problem) -> bool {
    problem.lengths.max_q() <= MOST_DECODED
}

/// A problem of a forward as a row: of a few queries decoding.
pub fn row_of(problem: Problem, group: &'static str) -> Wanted {
    if is_decoding(&problem) { Wanted::decoding(problem, group) } else { Wanted::new(problem, group) }
}

/// What becomes of a report when rows were added to it: a run that is stopped loses none that were kept.
pub type Keep<'a> = dyn FnMut(&Report) -> Result<()> + 'a;

/// Measures everything; rows of shapes that no kernel computes hold the reason.
///
/// # Errors
/// No usable GPU, no peers where they are wanted, what the GPU reports, and what `keep` does.
pub fn run(options: &Options, progress: &mut Progress<'_>, keep: &mut Keep<'_>) -> Result<Report> {
    let gpu = Gpu::open()?;
    let mut peers = if options.peers { Some(Peers::start()?) } else { None };
    let mut report = Report {
        provenance: Provenance::new(&gpu)?,
        reps: options.turns.rounds * options.turns.reps,
        rounds: options.turns.rounds,
        peers: peers.as_mut().map(PeersRecord::of).transpose()?,
        kernels: Vec::new(),
        rows: Vec::new(),
        missing: 0,
        summary: Vec::new(),
    };
    // Compiled in parallel, a second or so each; errors are reported when the kernels are bound below.
    options.shapes.par_iter().for_each(|wanted| drop(bound(&gpu, &wanted.problem, options)));
    if options.tune {
        progress(Step::Begin("tuning".to_owned()));
        tune(&gpu, options)?;
    }
    progress(Step::Total(options.shapes.len()));
    if let Some(peers) = &mut peers {
        progress(Step::Begin("compiling FlashAttention 4's kernels".to_owned()));
        peers.warm(&options.shapes, &options.peer_names, options.pass)?;
    }
    measure_rows(&gpu, options, peers, &mut report, progress, keep)?;
    Ok(report)
}

/// Adds the rows of all shapes to `report`, in the order of the shapes. Shapes of one comparison are timed in
/// turns, unless peers run beside.
fn measure_rows(
    gpu: &Gpu,
    options: &Options,
    mut peers: Option<Peers>,
    report: &mut Report,
    progress: &mut Progress<'_>,
    keep: &mut Keep<'_>,
) -> Result<()> {
    let together = match &peers {
        None => Wanted::comparisons(&options.shapes),
        Some(_) => (0..options.shapes.len()).map(|shape| vec![shape]).collect(),
    };
    let mut rows: Vec<Vec<Row>> = options.shapes.iter().map(|_| Vec::new()).collect();
    report.missing = options.shapes.len();
    for shapes in together {
        report.missing -= shapes.len();
        let Problem { lengths, head_dim, mask, types, .. } = options.shapes[shapes[0]].problem;
        progress(Step::Begin(format!("N {} hd {head_dim} {mask}", lengths.max_k())));
        let mut found = Vec::new();
        for shape in shapes {
            let wanted = &options.shapes[shape];
            let failed = |(kernel, why): (String, String)| Row::failed(wanted, &kernel, options.pass, why);
            match bound(gpu, &wanted.problem, options) {
                Ok(Found { bound, refused }) => {
                    found.push((shape, bound));
                    rows[shape].extend(refused.into_iter().map(failed));
                }
                Err(error) if error_is_fatal(&error) => return Err(error.into()),
                Err(error) => {
                    rows[shape].push(failed(("none".to_owned(), without_logs(&error.to_string()))));
                    progress(Step::Done);
                }
            }
        }
        if !found.is_empty() {
            let peers = peers.as_mut().map(|peers| (peers, options.peer_names.as_slice()));
            let measured = with_half!(
                types.wide(),
                T => measure::<T>(gpu, found, options, peers, &mut report.kernels),
                else unreachable!("no kernel is found for other types")
            )?;
            for (shape, measured) in measured {
                rows[shape].splice(0..0, measured);
                progress(Step::Done);
            }
        }
        report.rows = rows.iter().flatten().cloned().collect();
        report.sum_up();
        keep(report)?;
    }
    Ok(())
}

/// Has the library measure its best few kernels for every shape; binds from then on give the winners.
fn tune(gpu: &Gpu, options: &Options) -> Result<()> {
    gpu.set_tuning(Tuning::ON_FIRST_USE)?;
    for wanted in &options.shapes {
        // Errors are reported where the shape is measured.
        drop(bound(gpu, &wanted.problem, options));
    }
    for outcome in gpu.finish_tuning() {
        if let Some(error) = outcome.error {
            tracing::warn!(problem = ?outcome.problem, %error, "not tuned");
        }
    }
    Ok(gpu.set_tuning(Tuning::Off)?)
}

/// Whether no shape can be measured after this error, as opposed to this one.
fn error_is_fatal(error: &fa_attn::Error) -> bool {
    use fa_attn::Error::{Kernels, Plan};
    use fa_kernels::Error::{Mismatch, Refused, SharedMemory};
    !matches!(error, Plan(_) | Kernels(Mismatch { .. } | Refused { .. } | SharedMemory { .. }))
}

/// What is measured for a shape.
struct Found {
    /// The kernels.
    bound: Vec<Bound>,
    /// Changes of the library's choice that cannot be made: what would have been measured, and why not.
    refused: Vec<(String, String)>,
}

/// The kernels for a shape: those given that compute it, or the library's choice and changes of it.
fn bound(gpu: &Gpu, problem: &Problem, options: &Options) -> Result<Found, fa_attn::Error> {
    let (mut found, mut refused) = (Vec::<Bound>::new(), Vec::new());
    let chosen_for = &if options.pass.is_backward() { *problem } else { with_drawn_rows(problem) };
    if options.specs.is_empty() || options.beside_choice || !options.changes.is_empty() {
        let choice = BindOptions::default().with_family(options.family);
        found.push(gpu.bind(chosen_for, options.pass, &choice)?);
    }
    let mut mismatch = None;
    for PinnedSpec { spec, splits, .. } in &options.specs {
        if splits.is_none() && found.iter().any(|known| known.spec() == spec) {
            continue;
        }
        match bind_spec(gpu, problem, spec, *splits, options.pass) {
            Ok(pass) => found.push(pass),
            Err(error @ fa_attn::Error::Kernels(fa_kernels::Error::Mismatch { .. })) => {
                mismatch = Some(error)
            }
            Err(error) => return Err(error),
        }
    }
    for change in &options.changes {
        let choice = found[0].spec().clone();
        let changed = match change.of(&choice) {
            Ok(changed) => changed,
            Err(error) => {
                refused.push((format!("{choice}, {change}"), without_logs(&error.to_string())));
                continue;
            }
        };
        if found.iter().any(|known| *known.spec() == changed) {
            continue;
        }
        match bind_spec(gpu, chosen_for, &changed, None, options.pass) {
            Ok(pass) => found.push(pass),
            Err(error) if error_is_fatal(&error) => return Err(error),
            Err(error) => refused.push((changed.to_string(), without_logs(&error.to_string()))),
        }
    }
    match mismatch {
        Some(error) if found.is_empty() => Err(error),
        _ => Ok(Found { bound: found, refused }),
    }
}

/// Rows of shapes, by their places in the list, whose kernels are timed in turns; of one alone if peers are
/// timed beside it.
fn measure<T: Half>(
    gpu: &Gpu,
    shapes: Vec<(usize, Vec<Bound>)>,
    options: &Options,
    peers: Option<(&mut Peers, &[String])>,
    kernels: &mut Vec<KernelRecord>,
) -> Result<Vec<(usize, Vec<Row>)>> {
    let (mut runners, mut checked, mut right) = (Vec::new(), Vec::new(), Vec::new());
    for (shape, bound) in shapes {
        let mut runner = Runner::<T>::of(gpu, &options.shapes[shape], &bound[0])?;
        let judged = bound.iter().map(|pass| runner.check(pass)).collect::<Result<Vec<_>>>()?;
        let specs: Vec<KernelSpec> = bound.iter().map(|pass| pass.spec().clone()).collect();
        let passed = bound.into_iter().zip(&judged).filter(|(_, judged)| judged.passed);
        right.push(passed.map(|(pass, _)| pass).collect::<Vec<Bound>>());
        checked.push((shape, specs, judged));
        runners.push(runner);
    }
    let outcomes = match (runners.as_mut_slice(), right.as_slice()) {
        ([runner], [right]) => vec![runner.run(right, peers, options.turns)?],
        (runners, right) => run_together(runners, right, options.turns)?,
    };
    let mut rows = Vec::new();
    for ((shape, specs, judged), outcome) in checked.into_iter().zip(outcomes) {
        rows.push((shape, rows_of(gpu, &options.shapes[shape], &specs, judged, outcome, kernels)?));
    }
    Ok(rows)
}

/// The rows of a shape's kernels, with the times of those that were right.
fn rows_of(
    gpu: &Gpu,
    wanted: &Wanted,
    specs: &[KernelSpec],
    judged: Vec<Judged>,
    outcome: Outcome,
    kernels: &mut Vec<KernelRecord>,
) -> Result<Vec<Row>> {
    let Outcome { ours, peers, peer_errors } = outcome;
    let pass = specs[0].kernel.pass();
    let peers: BTreeMap<String, f64> =
        peers.into_iter().map(|(name, times)| (name, wanted.rate(times.median(), pass))).collect();
    let mut times = ours.into_iter();
    let mut rows = Vec::new();
    for (spec, judged) in specs.iter().zip(judged) {
        KernelRecord::add(kernels, spec, gpu.arch())?;
        if judged.passed {
            let times = times.next().unwrap_or_default();
            rows.push(Row::new(wanted, spec, judged, &times, peers.clone(), peer_errors.clone()));
        } else {
            let error = format!(
                "wrong on sampled rows: off by {:.3e} (tolerance {:.3e}), or not all written",
                judged.max_abs, judged.tolerance
            );
            rows.push(Row::failed(wanted, &spec.to_string(), pass, error));
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Lengths, Mask};

    use super::*;
    use crate::marks::Unit;

    #[test]
    fn few_queries_are_decoding() {
        let of = |queries| {
            let square = Problem::square(1, 1, 8, 128, Mask::FULL, Dtype::Bf16);
            row_of(square.with_lengths(Lengths::uniform(2, queries, 4096)), "all")
        };
        let (few, many) = (of(16), of(17));
        assert_eq!((few.unit, many.unit), (Unit::KvBytes, Unit::Flops));
        assert!(few.graph > 0 && many.graph == 0);
    }
}
