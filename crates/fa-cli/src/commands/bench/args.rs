//! The flags of `fa bench`.

use std::path::PathBuf;

use clap::Args;
use fa_core::{Lengths, Problem, Side};
use fa_lab::bench::Change;
use fa_lab::marks::Marks;
use fa_lab::runner::Turns;
use fa_lab::shape::whole;
use fa_planner::Mode;
use fa_planner::report::PlanFamily;

use crate::flags::{self, Backend, CpuArgs, HeadersArgs, ShapeArgs, flags_of};
use crate::term::failure::InputError;

/// What shapes drawn at random go without, besides the flags of shapes.
const BESIDE_RANDOM: [&str; 7] = ["append", "beside_choice", "draw", "filter", "marks", "page", "specs"];

/// Launches of each kernel that count, where the caller does not say.
const REPS: usize = 24;

/// `fa bench`.
#[derive(Debug, Args)]
#[command(after_help = BENCH_EXAMPLES)]
pub(crate) struct BenchArgs {
    /// Which implementation to measure (auto: the GPU for 16-bit types where there is one)
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: Backend,
    #[command(flatten)]
    pub shapes: ShapeArgs,
    /// Keys lie in pages of N keys, as of a server's cache, in random order on the GPU
    #[arg(long, alias = "page-size", value_name = "N", value_parser = parse_page)]
    #[arg(conflicts_with_all = ["append", "draw", "filter", "marks"])]
    pub page: Option<usize>,
    /// Measure appending to a cache instead, for a fixed list: one token and prefill, paged and contiguous,
    /// with and without rotary embedding, in bytes read and written per second
    #[arg(long, conflicts_with_all = flags_of::<ShapeArgs>().into_iter().filter(|flag| flag != "dtype"))]
    #[arg(conflicts_with_all = [
        "specs", "beside_choice", "changes", "family", "marks", "deterministic", "tune", "peers", "plot",
        "draw", "mode", "threads", "isa"
    ])]
    pub append: bool,
    /// Which pass to measure
    #[arg(long, value_parser = flags::passes(), default_value = "fwd")]
    pub mode: Mode,
    /// Least time to spend measuring a row on the CPU, in seconds [default: 0.5]
    #[arg(long, value_name = "S", value_parser = parse_seconds)]
    pub seconds: Option<f64>,
    #[command(flatten)]
    pub cpu: CpuArgs,
    #[command(flatten)]
    pub gpu: GpuArgs,
    /// Write the rows as JSON to this file, '-' for standard output instead of the table
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub json: Option<PathBuf>,
    /// Draw rate over sequence length to an SVG file
    #[arg(long, value_name = "FILE.svg", value_parser = crate::flags::plot_file)]
    pub plot: Option<PathBuf>,
    /// Draw the plot of this record, which --json wrote before; nothing is measured
    #[arg(long, value_name = "RECORD.json", requires = "plot", conflicts_with_all = flags_of::<ShapeArgs>())]
    #[arg(conflicts_with_all = [
        "json", "backend", "seconds", "marks", "peers", "filter", "mode", "threads", "isa", "headers",
        "specs", "beside_choice", "changes", "family", "deterministic", "tune", "reps"
    ])]
    pub draw: Option<PathBuf>,
}

const BENCH_EXAMPLES: &str = "\
Examples:
  fa bench --headdim 128 --seqlen 512,1024,2048 --causal
  fa bench --headdim 64,128 --dtype bf16 --mode both --threads 2 --json bench.json --plot bench.svg
  fa bench --json - --seqlen 1x16384 --heads 32:8
  fa bench --backend cuda --headdim 128 --heads 16 --tokens 16384 --both-masks --peers --plot rates.svg
  fa bench --backend cuda --marks sm90 --peers --json marks.json
  fa bench --backend cuda --marks models --mode bwd --peers
  fa bench --backend cuda --random 40 --seed 1 --mode bwd --peers --peer fa4,cudnn
  fa bench --backend cuda --random-packed 24 --seed 1 --mode bwd --peers --peer fa4
  fa bench --backend cuda --marks models --filter Gemma --spec kernel.ron
  fa bench --backend cuda --marks packed-bwd --mode bwd --change persistent=true
  fa bench --draw docs/results/marks-sm90-h100.json --plot marks.svg
  fa bench --backend cuda --marks decode --peers --peer fa3,cudnn
  fa bench --backend cuda --marks plan
  fa bench --backend cuda --batch 64 --heads 32:8 --headdim 128 --seqlen 1x4096 --page 16 --kv-dtype e4m3
  fa bench --latent --headdim 576-512 --heads 128:1 --batch 128 --seqlen 1x2048 --page 1      128 queries \
that name 2048 rows each
  fa bench --append --backend cpu
  fa bench --append --backend cuda --json append.json

Rates count 4 operations per visible (query, key) pair and element of the head dim, where pairs that a \
program alone hides count as visible; the backward counts 2.5 times that. Decoding is measured by the bytes \
of K and V, as replays of a CUDA graph of several calls, of us and of peers.";

/// Flags of `fa bench` that apply to the GPU only.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct GpuArgs {
    #[command(flatten)]
    pub headers: HeadersArgs,
    /// Measure the kernel of this file (RON, with `splits: 8` beside `spec` to divide keys so, or JSON as in
    /// the kernel cache; may be repeated) [default: the library's choice for each shape]
    #[arg(long = "spec", value_name = "FILE", conflicts_with = "family")]
    pub specs: Vec<PathBuf>,
    /// Measure the library's choice for each shape beside --spec's kernels, in turns
    #[arg(long, requires = "specs", conflicts_with_all = ["changes", "family", "deterministic", "tune"])]
    pub beside_choice: bool,
    /// Measure the library's choice for each shape with these parameters changed, too, alternating with it,
    /// as in persistent=true or tile_order=Natural,do_stages=1 (may be repeated)
    #[arg(long = "change", value_name = "FIELD=VALUE,..", conflicts_with_all = ["specs", "tune"])]
    pub changes: Vec<Change>,
    /// Choose among the kernels of this family, even if others are faster here
    #[arg(long, value_parser = flags::plan_family())]
    pub family: Option<PlanFamily>,
    /// Time torch's attention backends, FlashAttention 3 and 4, and of keys in pages FlashInfer as well, as
    /// far as python3 (or FA_PYTHON) has them
    #[arg(long)]
    pub peers: bool,
    /// Time only these peers, as in fa3,cudnn (fa2, cudnn, fa3, fa4, flashinfer)
    #[arg(long = "peer", value_name = "PEER,..", value_delimiter = ',', requires = "peers")]
    #[arg(conflicts_with_all = ["append", "draw"])]
    #[arg(value_parser = ["fa2", "cudnn", "fa3", "fa4", "flashinfer"])]
    pub peer_names: Vec<String>,
    /// Measure a fixed list of shapes
    #[arg(long, value_parser = flags::marks())]
    #[arg(conflicts_with = "family", conflicts_with_all = flags_of::<ShapeArgs>())]
    pub marks: Option<Marks>,
    /// Measure this many shapes drawn at random: the problems of fa tune --random, of one pass
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=10_000), group = "drawn")]
    #[arg(conflicts_with_all = BESIDE_RANDOM, conflicts_with_all = flags_of::<ShapeArgs>())]
    pub random: Option<u16>,
    /// Measure this many packed batches drawn at random: lengths spread normally, lognormally, one long and
    /// many short, and equal
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=10_000), group = "drawn")]
    #[arg(conflicts_with_all = BESIDE_RANDOM, conflicts_with_all = flags_of::<ShapeArgs>())]
    #[arg(conflicts_with = "family")]
    pub random_packed: Option<u16>,
    /// The same seed draws the same shapes [default: 0]
    #[arg(long, value_name = "S", requires = "drawn", value_parser = whole::<u64>)]
    #[arg(conflicts_with_all = BESIDE_RANDOM, conflicts_with_all = flags_of::<ShapeArgs>())]
    pub seed: Option<u64>,
    /// Measure only those rows of --marks whose name, group, heads or lengths contain TEXT, as in Gemma or
    /// prefill
    #[arg(long, value_name = "TEXT", requires = "marks", conflicts_with_all = flags_of::<ShapeArgs>())]
    #[arg(conflicts_with_all = ["append", "family"])]
    pub filter: Option<String>,
    /// Measure deterministic gradients, which have the same bits in every run
    #[arg(long, conflicts_with = "specs")]
    pub deterministic: bool,
    /// Have the library measure its best few kernels for each shape first, within half a minute each, and
    /// keep the winners
    #[arg(long, conflicts_with_all = ["specs", "family"])]
    pub tune: bool,
    /// Timed launches of each kernel, in rounds of about six [default: 24]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub reps: Option<u16>,
}

impl BenchArgs {
    /// The shapes with their keys in pages, where these are asked for.
    ///
    /// # Errors
    /// [`InputError::Usage`] for gradients, which keys in pages do not have.
    pub(crate) fn in_pages(&self, problems: Vec<Problem>) -> Result<Vec<Problem>, InputError> {
        let Some(page) = self.page else { return Ok(problems) };
        if self.mode != Mode::Fwd {
            let message = format!("--page {page}: keys in pages have no gradients: leave out --mode");
            return Err(InputError::Usage(message));
        }
        let paged = |problem: Problem| {
            let (batch, keys) = (problem.lengths.sequences(), problem.lengths.max_k());
            let pages = batch.saturating_mul(keys.div_ceil(page)).max(1);
            let queries = problem.lengths.q();
            let problem = problem.with_lengths(Lengths::of(batch, queries, Side::paged(page, pages, keys)));
            problem.check().map_err(|error| InputError::Usage(format!("--page {page}: {error}")))?;
            Ok(problem)
        };
        problems.into_iter().map(paged).collect()
    }
}

fn parse_page(text: &str) -> Result<usize, String> {
    match whole::<usize>(text)? {
        0 => Err("a page of 0 keys: use 1 or more".to_owned()),
        page => Ok(page),
    }
}

impl GpuArgs {
    /// The first flag that is given, for the error where there is no GPU.
    pub(crate) fn given(&self) -> Option<&'static str> {
        [
            (self.headers.headers.is_some(), "--headers"),
            (!self.specs.is_empty(), "--spec"),
            (!self.changes.is_empty(), "--change"),
            (self.family.is_some(), "--family"),
            (self.peers, "--peers"),
            (self.marks.is_some(), "--marks"),
            (self.random.is_some(), "--random"),
            (self.random_packed.is_some(), "--random-packed"),
            (self.deterministic, "--deterministic"),
            (self.tune, "--tune"),
            (self.reps.is_some(), "--reps"),
        ]
        .into_iter()
        .find_map(|(given, name)| given.then_some(name))
    }

    /// How often each kernel runs.
    pub(crate) fn turns(&self) -> Turns {
        Turns::of(self.reps.map_or(REPS, usize::from))
    }
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 3600.0 => Ok(value),
        _ => Err("must be above 0 and at most 3600".to_owned()),
    }
}
