//! `fa ladder`: what each optimisation step brings on the GPU at hand.

mod report;
mod sm80;
mod sm90;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use std::path::PathBuf;

use fa_core::{Family, KernelSpec, Problem};
use rayon::prelude::*;

use crate::contest::{Arena, Turns};
use crate::cuda::{Bound, Device, Half, with_half};
use crate::flags::HeadDim;
use crate::record::Provenance;
use crate::term::destinations::Destinations;
use crate::term::failure::{InputError, Verdict};
use crate::term::progress::Steps;

use report::{Report, Row};

/// `fa ladder`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct LadderArgs {
    /// The kernels whose steps are measured
    #[arg(long, value_parser = ladder(), default_value = "sm80")]
    pub arch: Family,
    /// Sequence lengths [default: 1k to 16k for sm80, 4096 for sm90]
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub seqlen: Vec<u32>,
    /// Head dims of the sm90 kernels [default: 128]
    #[arg(long, value_name = "D[-DV],..", value_delimiter = ',')]
    pub headdim: Vec<HeadDim>,
    /// Launches of each step that count, in turns of about six
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub reps: u16,
    /// Write the rows as JSON to this file, '-' for standard output instead of the table
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub json: Option<PathBuf>,
    /// Draw the steps to an SVG file
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  fa ladder --plot ladder.svg
  fa ladder --arch sm90 --headdim 64,128 --seqlen 1024,8192 --json ladder.json

The published ladders beside ours are other GPUs' (an A10G and a B200) and other kernels': their shape is compared, as a \
ratio to the first step, not their rates. Every step's output is checked before it is timed, and all steps on a shape take \
turns.";

fn ladder() -> impl TypedValueParser<Value = Family> {
    let values = Family::ALL.map(|family| {
        PossibleValue::new(family.name()).help(match family {
            Family::Sm80 => {
                "mma.sync: from a naive kernel to ldmatrix and a pipeline, and from small tiles to tuned ones"
            }
            Family::Sm90 => "wgmma: each knob alone, beside the same kernel without the change",
        })
    });
    PossibleValuesParser::new(values).try_map(|name| name.parse::<Family>())
}

/// A kernel on the ladder.
#[derive(Clone, Debug)]
pub struct Step {
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
    /// The steps, the one that others are held against first.
    pub steps: Vec<Step>,
    /// Rates of a published ladder in TFLOP/s, by step; none for steps that it does not have.
    pub published: Vec<Option<f64>>,
}

/// Runs the command.
///
/// # Errors
/// Bad input, an unwritable target, no usable GPU.
pub fn command(args: &LadderArgs) -> anyhow::Result<Verdict> {
    if args.arch == Family::Sm80 && !args.headdim.is_empty() {
        let message = "the sm80 ladder is that of head dim 128, as published: leave --headdim out";
        return Err(InputError::Usage(message.to_owned()).into());
    }
    let destinations = Destinations::probe(args.json.as_deref(), args.plot.as_deref())?;
    let device = Device::open()?;
    let seqlens: Vec<usize> = args.seqlen.iter().map(|&n| n as usize).collect();
    let ladders = match args.arch {
        Family::Sm80 => sm80::ladders(device.kernels.arch(), &seqlens)?,
        Family::Sm90 => sm90::ladders(device.kernels.arch(), &args.headdim, &seqlens)?,
    };
    let turns = Turns::of(usize::from(args.reps));
    let specs: Vec<(&Problem, &KernelSpec)> = ladders
        .iter()
        .flat_map(|ladder| ladder.steps.iter().map(move |step| (&ladder.problem, step)))
        .flat_map(|(problem, step)| step.specs.iter().flatten().map(move |spec| (problem, spec)))
        .collect();
    // Compiling takes a second a kernel and all cores can do it; what goes wrong shows again below.
    specs.par_iter().for_each(|(problem, spec)| drop(device.kernels.forward_with(problem, spec)));
    let mut report = Report::new(Provenance::new(&device)?, args.arch, turns);
    let mut steps = Steps::new(ladders.len());
    for ladder in &ladders {
        steps.begin(format!("{}, N {}", ladder.name, ladder.problem.lengths.max_k()));
        let rows = with_half!(
            ladder.problem.types.qkv,
            T => climb::<T>(&device, ladder, turns, &mut report),
            else unreachable!("ladders are of 16-bit types")
        )?;
        report.rows.extend(rows);
        steps.advance();
    }
    drop(steps);
    destinations.write(&report, || report.draw(), || report.table())?;
    Ok(if report.rows.iter().any(|row| row.wrong) { Verdict::Bad } else { Verdict::Good })
}

/// Measures the steps of one ladder, all in turns.
fn climb<T: Half>(
    device: &Device,
    ladder: &Ladder,
    turns: Turns,
    report: &mut Report,
) -> anyhow::Result<Vec<Row>> {
    let problem = &ladder.problem;
    let mut arena: Option<Arena<'_, T>> = None;
    let mut runners: Vec<(usize, Bound)> = Vec::new();
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
            let forward = match device.kernels.forward_with(problem, spec) {
                Ok(forward) => Bound::Forward(forward),
                Err(error) => {
                    errors[index] = Some(crate::record::without_logs(&error.to_string()));
                    continue;
                }
            };
            if arena.is_none() {
                arena = Some(Arena::new(device, problem, &forward)?);
            }
            let Some(arena) = &mut arena else { continue };
            let judged = arena.check(&forward)?;
            if judged.passed {
                report.add_kernel(spec, device.kernels.arch())?;
                runners.push((index, forward));
            } else {
                wrong[index] = true;
                errors[index] =
                    Some(format!("wrong: off by {:.2e} of {:.2e}", judged.max_abs, judged.tolerance));
            }
        }
    }
    let Some(mut arena) = arena else {
        return Ok(report::rows(ladder, &[], &errors, &wrong));
    };
    let (indices, forwards): (Vec<usize>, Vec<Bound>) = runners.into_iter().unzip();
    let outcome = arena.contest(&forwards, problem, None, turns)?;
    let timed: Vec<(usize, &KernelSpec, f64)> = indices
        .iter()
        .zip(&forwards)
        .zip(&outcome.ours)
        .map(|((&index, forward), times)| (index, forward.spec(), times.median()))
        .collect();
    Ok(report::rows(ladder, &timed, &errors, &wrong))
}
