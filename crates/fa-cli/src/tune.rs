//! `fa tune`: kernels measured for a problem, and the winner kept where the library finds it.
//!
//! Workers do the measuring, so that a kernel that breaks its context breaks nothing else. What has been measured is
//! written down as it comes, and not measured again while the kernels' sources stay as they are.

pub mod candidates;
mod measured;
mod report;
mod worker;

use std::path::PathBuf;

use anyhow::Context;
use fa_attn::tune::{self, TuneKey, Tuned, TunedEntry};
use fa_core::{Family, Pass, Problem};
use fa_kernels::{Compiler, CompilerKind, Headers, Source, smem_bytes};

use rayon::prelude::*;

use crate::bench_gpu::{Marks, fingerprint};
use crate::contest::Turns;
use crate::cuda::Device;
use crate::flags::{self, PlanFamily, ShapeArgs, pass_of};
use crate::record::Provenance;
use crate::term::destinations::Destinations;
use crate::term::failure::{InputError, Verdict};
use crate::term::output;
use crate::term::progress::Steps;

use candidates::Candidate;
use measured::{Measured, Notebook, Result as Found};

/// `fa tune`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct TuneArgs {
    #[command(flatten)]
    pub shapes: ShapeArgs,
    /// Which pass to tune
    #[arg(long, value_parser = flags::one_pass(), default_value = "fwd")]
    pub mode: Pass,
    /// Tune gradients that have the same bits in every run
    #[arg(long)]
    pub deterministic: bool,
    /// Tune for a fixed list of shapes
    #[arg(long, value_enum, conflicts_with_all = [
        "batch", "tokens", "seqlen", "heads", "headdim", "causal", "window", "both_masks", "dtype", "family"
    ])]
    pub marks: Option<Marks>,
    /// Kernels to choose from [default: the fastest that the GPU runs]
    #[arg(long, value_parser = PlanFamily::parser())]
    pub family: Option<PlanFamily>,
    /// Tiles that are tried, the planner's best first; the best of them also with other knobs, as many again
    #[arg(short = 'n', long, value_name = "N", default_value_t = 8,
          value_parser = clap::value_parser!(u16).range(1..=200))]
    pub candidates: u16,
    /// Launches of each kernel that count, in turns of about six
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub reps: u16,
    /// Measure again what has been measured
    #[arg(long)]
    pub fresh: bool,
    /// Where the winners go [default: FA_TUNED, or tuned.ron beside the kernel cache, where the library looks]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Write everything measured beside its prediction as JSON, '-' for standard output instead of the table
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub json: Option<PathBuf>,
    /// Write how well predictions rank the kernels as Markdown
    #[arg(long, value_name = "FILE.md")]
    pub report: Option<PathBuf>,
    /// Measure what standard input says: the part of `fa tune` that runs in a process of its own
    #[arg(long, hide = true)]
    pub worker: bool,
}

const EXAMPLES: &str = "\
Examples:
  fa tune --headdim 128 --heads 16 --seqlen 4096 --batch 4 --causal
  fa tune --marks sm90 -n 12 --report tuning.md --json tuning.json
  fa tune --mode bwd --marks sm90-bwd
  fa tune --headdim 64 --heads 32 --seqlen 1024 --family sm80 --fresh

A problem's key is its head dims, mask, soft cap, query heads per K/V head, and its lengths and heads over all sequences \
rounded up to powers of two. Interrupted, it goes on where it was.";

/// Runs the command.
///
/// # Errors
/// Bad input, an unwritable target, no usable GPU or compiler, workers that cannot be started.
pub fn command(args: &TuneArgs) -> anyhow::Result<Verdict> {
    let turns = Turns::of(usize::from(args.reps));
    if args.worker {
        return worker::work(turns);
    }
    let pass = pass(args)?;
    let (problems, family) = problems(args)?;
    let destinations = Destinations::probe(args.json.as_deref(), args.report.as_deref())?;
    let table = args.output.clone().or_else(tune::user_table).context(
        "there is no place for the winners: give --output, or set FA_TUNED, or HOME for the default",
    )?;
    let mut tuned = Tuned::read(&table)?;
    let device = Device::open()?;
    let provenance = Provenance::new(&device)?;
    let gpu = provenance.device.gpu.clone();
    let arch = device.kernels.arch();
    let family = family.unwrap_or(Family::native(arch));
    let mut notebook = Notebook::open(&table.with_extension("measured.jsonl"))?;
    let mut contests: Vec<(Problem, Vec<Candidate>)> = Vec::new();
    for problem in problems {
        contests.push((problem, candidates::of(&problem, arch, family, pass, usize::from(args.candidates))?));
    }
    let faults = compile(&device, &contests)?;
    // The workers need its memory.
    drop(device);

    let mut steps = Steps::new(contests.len());
    let mut results: Vec<Measured> = Vec::new();
    for (problem, candidates) in &contests {
        steps.begin(format!("N {} hd {} {}", problem.lengths.max_k(), problem.head_dim, problem.mask));
        let mut found: Vec<Found> = Vec::new();
        for candidate in candidates {
            let sources = fingerprint(&candidate.spec, arch)?;
            let fault = faults.iter().find(|(spec, _)| *spec == candidate.spec);
            let known = notebook.find(&gpu, problem, &candidate.spec, &sources).filter(|_| !args.fresh);
            found.push(Found {
                ms: known.and_then(|known| known.ms),
                error: fault
                    .map(|(_, why)| why.clone())
                    .or_else(|| known.and_then(|known| known.error.clone())),
                sources,
            });
        }
        if found.iter().any(|found| found.ms.is_none() && found.error.is_none()) {
            // Times of one run are compared with one another, so all that can run do.
            worker::measure(problem, candidates, &mut found, turns)?;
            notebook.add(&gpu, problem, candidates, &found)?;
        }
        let result = Measured { problem: *problem, candidates: candidates.clone(), found };
        if let Some((spec, ms)) = result.best() {
            let entry = TunedEntry {
                key: TuneKey::of(problem),
                spec: spec.clone(),
                tflops: (problem.flops(pass) / (ms * 1e9) * 10.0).round() / 10.0,
            };
            tuned.set(&gpu, entry);
            tuned.write(&table)?;
        }
        results.push(result);
        steps.advance();
    }
    drop(steps);
    let report = report::Report::new(provenance, turns, pass, &results);
    destinations.write(&report, || Ok(report.markdown()), || report.table())?;
    output::note(&format!("winners are in {}", table.display()));
    Ok(if results.iter().all(|result| result.best().is_some()) { Verdict::Good } else { Verdict::Bad })
}

/// The pass that is tuned.
fn pass(args: &TuneArgs) -> Result<Pass, InputError> {
    let pass = pass_of(args.mode, args.deterministic)?;
    if args.marks.is_some_and(|marks| marks.backward() != pass.is_backward()) {
        let message = "the marks sm80 and sm90 go with --mode fwd, sm80-bwd and sm90-bwd with --mode bwd";
        return Err(InputError::Usage(message.to_owned()));
    }
    Ok(pass)
}

fn problems(args: &TuneArgs) -> anyhow::Result<(Vec<Problem>, Option<Family>)> {
    if let Some(marks) = args.marks {
        let problems = marks.shapes().into_iter().map(|wanted| wanted.problem).collect();
        return Ok((problems, Some(marks.family())));
    }
    let problems = args.shapes.problems_of_halves()?;
    Ok((problems, args.family.map(PlanFamily::kernels).transpose()?))
}

/// Compiles every candidate into the cache, on all cores; what is wrong with those that do not compile cleanly.
fn compile(
    device: &Device,
    contests: &[(Problem, Vec<Candidate>)],
) -> anyhow::Result<Vec<(fa_core::KernelSpec, String)>> {
    let mut specs: Vec<&fa_core::KernelSpec> = Vec::new();
    for candidate in contests.iter().flat_map(|(_, candidates)| candidates) {
        if !specs.contains(&&candidate.spec) {
            specs.push(&candidate.spec);
        }
    }
    let compiler = Compiler::find(CompilerKind::Nvrtc)?;
    let (arch, headers, cache) = (device.kernels.arch(), Headers::embedded(), device.kernels.cache());
    let work = || {
        let compile = |spec: &&fa_core::KernelSpec| {
            let source = Source::new(spec, arch, Some(smem_bytes(spec)), &headers);
            let error = source.and_then(|source| cache.get(&compiler, spec, &source)).err()?;
            Some(((*spec).clone(), error.to_string()))
        };
        specs.par_iter().filter_map(compile).collect()
    };
    Ok(crate::term::progress::spinner("compiling", work))
}
