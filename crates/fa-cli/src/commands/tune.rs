//! `fa tune`: kernels measured for a problem, and the winner kept where the library finds it.

mod judged;
mod page;

use std::path::PathBuf;

use anyhow::Context;
use fa_attn::tune::user_table;
use fa_core::{KernelSpec, Pass, ScoreMod};
use fa_lab::Error;
use fa_lab::marks::Marks;
use fa_lab::runner::Turns;
use fa_lab::shape::whole;
use fa_lab::spec_file::read_spec_of;
use fa_lab::tune::draw::Drawing;
use fa_lab::tune::judge::judge;
use fa_lab::tune::{self, Options, Problems, Wanted};
use fa_planner::Mode;
use fa_planner::report::PlanFamily;

use crate::commands::worker;
use crate::flags::{self, HeadersArgs, ShapeArgs, flags_of, pass_of};
use crate::term::destinations::Destinations;
use crate::term::failure::{InputError, Verdict};
use crate::term::{output, progress};

/// `fa tune`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TuneArgs {
    #[command(flatten)]
    pub headers: HeadersArgs,
    #[command(flatten)]
    pub shapes: ShapeArgs,
    /// Which pass to tune; both with --random only
    #[arg(long, value_parser = flags::passes(), default_value = "fwd")]
    pub mode: Mode,
    /// Tune deterministic gradients, which have the same bits in every run
    #[arg(long)]
    pub deterministic: bool,
    /// Tune for a fixed list of shapes
    #[arg(long, value_parser = flags::marks())]
    #[arg(conflicts_with = "family", conflicts_with_all = flags_of::<ShapeArgs>())]
    pub marks: Option<Marks>,
    /// Tune for this many problems drawn at random, and show how far the planner's first choices are behind
    /// the best
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    #[arg(conflicts_with = "marks", conflicts_with_all = flags_of::<ShapeArgs>())]
    pub random: Option<u16>,
    /// The same seed draws the same problems [default: 0]
    #[arg(long, value_name = "S", requires = "random", conflicts_with_all = flags_of::<ShapeArgs>())]
    #[arg(conflicts_with_all = ["marks", "specs"], value_parser = whole::<u64>)]
    pub seed: Option<u64>,
    /// Measure nothing: show how far today's first choices are behind the best of these records (--json of
    /// earlier runs with --random); needs no GPU
    #[arg(long, value_name = "RECORD", num_args = 1..)]
    #[arg(conflicts_with_all = flags_of::<ShapeArgs>(), conflicts_with_all = [
        "marks", "random", "seed", "mode", "deterministic", "family", "candidates", "specs"
    ], conflicts_with_all = ["headers", "reps", "fresh", "output"])]
    pub judge: Vec<PathBuf>,
    /// Kernels to choose from [default: the fastest that the GPU runs; with --random all that it runs]
    #[arg(long, value_parser = flags::plan_family())]
    pub family: Option<PlanFamily>,
    /// Number of tiles to try, the planner's best first; as many variants of the best ones are tried as well
    #[arg(short = 'n', long, value_name = "N", default_value_t = 8,
          value_parser = clap::value_parser!(u16).range(1..=200))]
    pub candidates: u16,
    /// Try these kernels (RON, as `fa plan --format spec` prints them) in place of the planner's: a search
    /// space of your own, all of one family
    #[arg(long = "spec", value_name = "FILE", num_args = 1..)]
    #[arg(conflicts_with_all = ["marks", "random", "family", "candidates"])]
    pub specs: Vec<PathBuf>,
    /// Timed launches of each kernel, in rounds of about six
    #[arg(long, value_name = "N", default_value_t = 24)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub reps: u16,
    /// Measure again what has been measured
    #[arg(long)]
    pub fresh: bool,
    /// Where the winners go [default: FA_TUNED, or tuned.json beside the kernel cache, where the library
    /// looks]
    #[arg(short, long, value_name = "FILE", value_parser = flags::results())]
    pub output: Option<PathBuf>,
    /// Write every measurement with its prediction as JSON, '-' for standard output instead of the table
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub json: Option<PathBuf>,
    /// Write how well predictions rank the kernels as Markdown
    #[arg(long, value_name = "FILE.md", value_parser = crate::flags::markdown_file)]
    pub report: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  fa tune --headdim 128 --heads 16 --seqlen 4096 --batch 4 --causal
  fa tune --marks sm90 -n 12 --report tuning.md --json tuning.json
  fa tune --mode bwd --marks sm90-bwd
  fa tune --headdim 64 --heads 32 --seqlen 1024 --family sm80 --fresh
  fa tune --headdim 128 --heads 16 --seqlen 4096 --causal --spec a.ron b.ron c.ron
  fa tune --random 60 --seed 1 --mode both --json drawn.json --report drawn.md
  fa tune --judge drawn.json

Random problems differ in length, batch, group, head dims, mask and soft cap, pass and family; they stay \
below 0.8 TFLOP and 1 GiB. Constants are fitted to those with an even number and judged by those with an odd \
one.

Problems share a winner where head dims, mask, soft cap and query heads per K/V head are equal, and so are \
lengths and heads over all sequences, rounded up to powers of two. An interrupted run resumes where it \
stopped.";

/// Runs the command.
///
/// # Errors
/// Bad input, an unwritable target, no usable GPU or compiler, workers that cannot be started.
pub(crate) fn command(args: &TuneArgs) -> anyhow::Result<Verdict> {
    args.headers.choose()?;
    if !args.judge.is_empty() {
        let destinations = Destinations::probe(args.json.as_deref(), args.report.as_deref(), &args.judge)?;
        let judgement = judge(&args.judge)?;
        let page = || judged::markdown(&judgement);
        destinations.write(&judgement, || Ok(page()), || judged::table(&judgement))?;
        return Ok(Verdict::Good);
    }
    let problems = problems(args)?;
    let destinations = Destinations::probe(args.json.as_deref(), args.report.as_deref(), &[])?;
    let table = args.output.clone().or_else(user_table).context(
        "there is no place for the winners: give --output, or set FA_TUNED, or HOME for the default",
    )?;
    let options = Options {
        problems,
        candidates: usize::from(args.candidates),
        specs: specs(args)?,
        turns: Turns::of(usize::from(args.reps)),
        fresh: args.fresh,
        table,
    };
    let report = tune::run(&options, &worker::program()?, &mut progress::steps()).inspect_err(|error| {
        if matches!(error, Error::NoDriver | Error::OldGpu { .. }) {
            output::note(
                "tuning measures on a GPU; without one `fa plan` predicts, and `fa tune --judge RECORD..` \
                 compares the planner with what was measured elsewhere",
            );
        }
    })?;
    destinations.write(&report, || Ok(page::markdown(&report)), || page::table(&report))?;
    output::note(&format!("winners are in {}", options.table.display()));
    Ok(if report.all_have_winners() { Verdict::Good } else { Verdict::Bad })
}

/// The kernels of `--spec`.
fn specs(args: &TuneArgs) -> anyhow::Result<Vec<KernelSpec>> {
    if args.specs.is_empty() {
        return Ok(Vec::new());
    }
    let pass = pass(args)?;
    args.specs.iter().map(|path| Ok(read_spec_of(path, pass)?)).collect()
}

/// The one pass that is tuned.
fn pass(args: &TuneArgs) -> Result<Pass, InputError> {
    let pass = match args.mode {
        Mode::Fwd => Pass::Forward,
        Mode::Bwd => Pass::BACKWARD,
        Mode::Both => {
            let message =
                "invalid value 'both' for '--mode' without --random: use fwd or bwd, a pass at a time";
            return Err(InputError::Usage(message.to_owned()));
        }
    };
    let pass = pass_of(pass, args.deterministic)?;
    args.marks.map_or(Ok(()), |marks| marks.check_pass(pass)).map_err(InputError::Usage)?;
    Ok(pass)
}

fn problems(args: &TuneArgs) -> anyhow::Result<Problems> {
    let family = args.family.map(PlanFamily::kernels);
    if let Some(count) = args.random {
        let backward = pass_of(Pass::BACKWARD, args.deterministic)?;
        let passes = match args.mode {
            Mode::Both => vec![Pass::Forward, backward],
            Mode::Fwd | Mode::Bwd => vec![pass(args)?],
        };
        let (count, seed) = (usize::from(count), args.seed.unwrap_or(0));
        return Ok(Problems::Drawn(Drawing { count, seed, passes, families: family.into_iter().collect() }));
    }
    if args.shapes.mods.of(ScoreMod::NONE).map_err(InputError::Usage)?.program.is_some() {
        let message = "tables hold no kernels with programs: leave out --mask-mod, --score-mod, --bias and \
                       --chunk";
        return Err(InputError::Usage(message.to_owned()).into());
    }
    let pass = pass(args)?;
    let (problems, family) = match args.marks {
        Some(marks) => (marks.shapes().into_iter().map(|wanted| wanted.problem).collect(), marks.family()),
        None => (args.shapes.problems_of_halves()?, family),
    };
    Ok(Problems::Given(problems.into_iter().map(|problem| Wanted { problem, family, pass }).collect()))
}
