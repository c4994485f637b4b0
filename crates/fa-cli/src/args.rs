//! The command line: flags are parsed here, once, into resolved values.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use fa_planner::Mode;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum};
use fa_core::{Arch, Dtype, Family, Mask, Pass, Problem, TensorLayout};
use fa_cpu::simd::Isa;

use crate::bench_gpu::GpuArgs;
use crate::build::BuildArgs;
use crate::failure::InputError;
use crate::ladder::LadderArgs;
use crate::tune::TuneArgs;

/// Plan, run, check and measure attention.
///
/// `fa` plans an attention problem for a GPU architecture (which tiles fit, which is best, and why the others are not)
/// and computes it on the machine at hand.
#[derive(Debug, Parser)]
#[command(name = "fa", version, arg_required_else_help = true, max_term_width = 110, after_help = TOP_EXAMPLES)]
pub struct Cli {
    /// Show what is going on, on standard error (-v info, -vv debug, -vvv trace)
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const TOP_EXAMPLES: &str = "\
Examples:
  fa run examples/minilm-layer0.safetensors           compute attention on Q, K, V of a real layer
  fa plan --headdim 128 --seqlen 8192 --causal        the best kernels for H100, and their limits
  fa check out.safetensors other.safetensors          are two outputs equal within tolerance?
  fa doctor                                           what works on this machine

Exit codes: 0 done; 1 a negative verdict or a failure; 2 bad input or usage.";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Compute attention on the tensors of a safetensors file
    Run(RunArgs),
    /// Plan kernels for a problem and a GPU architecture
    Plan(PlanArgs),
    /// Compare two outputs and judge the difference
    Check(CheckArgs),
    /// Measure attention on this machine
    Bench(BenchArgs),
    /// Compile the shipped GPU kernels, without needing a GPU
    Build(BuildArgs),
    /// Validate the GPU kernels against the CPU oracle
    Validate(crate::validate::args::ValidateArgs),
    /// Measure kernels for a problem on this GPU; the library uses the winner from then on
    Tune(TuneArgs),
    /// Measure the kernels' optimisation steps one after the other
    Ladder(LadderArgs),
    /// Say what works on this machine, and what to do about what does not
    Doctor(DoctorArgs),
    /// Print a shell's completion script
    Completions(CompletionsArgs),
    /// Print the manual page (roff), of one command if named
    Man(ManArgs),
}

/// Which implementation computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// The fastest that works here
    Auto,
    /// Tiled, multi-threaded, SIMD
    Cpu,
    /// Naive f64: slow, exact
    Reference,
    /// Kernels compiled for the first NVIDIA GPU: f16 and bf16
    Cuda,
}

/// `fa run`.
#[derive(Debug, Args)]
#[command(after_help = RUN_EXAMPLES)]
pub struct RunArgs {
    /// File with the tensors q, k, v (and dout with --backward), all f32, f16 or bf16
    pub input: PathBuf,
    /// Where to write out and lse (with --backward also dq, dk, dv); replaced in one step when all is computed
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub attention: AttentionArgs,
    /// Also compute the gradients dq, dk, dv of dout
    #[arg(long)]
    pub backward: bool,
    /// Gradients with the same bits in every run, which on the GPU costs some speed
    #[arg(long, requires = "backward")]
    pub deterministic: bool,
    /// Which implementation computes
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: Backend,
    #[command(flatten)]
    pub cpu: CpuArgs,
    /// GPU architecture whose plan is shown
    #[arg(long, default_value = "sm90")]
    pub arch: Arch,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

const RUN_EXAMPLES: &str = "\
Examples:
  fa run examples/minilm-layer0.safetensors -o out.safetensors
  fa run qkv.safetensors --causal --window 256,0 --layout bhsd -o out.safetensors
  fa run qkv.safetensors --causal --backward -o grads.safetensors --threads 8
  fa run qkv.safetensors --causal --backward --backend cuda --deterministic -o grads.safetensors

Shapes: q [batch, seqlen_q, heads_q, head_dim], k [batch, seqlen_k, heads_kv, head_dim], v [batch, seqlen_k, heads_kv, \
head_dim_v]; heads before seqlen with --layout bhsd. out has q's layout, lse is f32 [batch, heads_q, seqlen_q] (natural \
logarithm). Masks are aligned at the bottom right: query i sits on key i + seqlen_k - seqlen_q.";

/// What the tensors of a file do not say about the problem.
#[derive(Clone, Debug, Default, Args)]
pub struct AttentionArgs {
    #[command(flatten)]
    pub mask: MaskArgs,
    /// Factor on Q K^T [default: 1/sqrt(head_dim)]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub scale: Option<f64>,
    /// Soft cap: scores become X tanh(score / X), before the mask
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub softcap: Option<f64>,
    /// Order of the tensors' axes [default: the file's metadata entry 'layout', else bshd]
    #[arg(long, value_parser = parse_layout)]
    pub layout: Option<TensorLayout>,
}

/// Mask flags.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct MaskArgs {
    /// No query sees a key after its own
    #[arg(long)]
    pub causal: bool,
    /// Each query sees L keys before and R keys after its own; 'inf' for no limit
    #[arg(long, value_name = "L,R", allow_hyphen_values = true)]
    pub window: Option<Window>,
}

impl MaskArgs {
    /// The mask: causal cuts the window's right side off.
    pub fn mask(&self) -> Mask {
        let Window { left, right } = self.window.unwrap_or(Window { left: None, right: None });
        Mask { left, right: if self.causal { Some(0) } else { right } }
    }
}

/// Flags of the CPU implementation.
#[derive(Clone, Debug, Default, Args)]
pub struct CpuArgs {
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub threads: Option<u16>,
    /// Instruction set of the CPU kernels: portable, neon, avx2, avx512, avx512-bf16, amx-bf16 [default: the best
    /// that this CPU has]
    #[arg(long)]
    pub isa: Option<Isa>,
}

/// Problem flags of `fa plan`.
#[derive(Clone, Debug, Args)]
pub struct ProblemArgs {
    /// Independent sequences
    #[arg(long, default_value_t = 4)]
    pub batch: usize,
    /// Sequence length, or queries x keys as in 1x4096
    #[arg(long, value_name = "N[xM]", default_value = "4096", conflicts_with_all = ["seqlen_q", "seqlen_k"])]
    pub seqlen: Seqlen,
    /// Queries per sequence
    #[arg(long, requires = "seqlen_k")]
    pub seqlen_q: Option<usize>,
    /// Keys per sequence
    #[arg(long, requires = "seqlen_q")]
    pub seqlen_k: Option<usize>,
    /// Query heads, and key/value heads if fewer
    #[arg(long, value_name = "Q[:KV]", default_value = "16")]
    pub heads: Heads,
    /// Head dim, and the values' if different, as in 192-128
    #[arg(long, value_name = "D[-DV]", default_value = "128")]
    pub headdim: HeadDim,
    #[command(flatten)]
    pub mask: MaskArgs,
    /// Element type: bf16, f16, f32
    #[arg(long, default_value = "bf16")]
    pub dtype: Dtype,
    /// Scores pass through a soft cap
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub softcap: Option<f64>,
}

impl ProblemArgs {
    /// The problem, checked.
    ///
    /// # Errors
    /// What [`Problem::check`] finds.
    pub fn problem(&self) -> Result<Problem, fa_core::ProblemError> {
        let seqlen = match (self.seqlen_q, self.seqlen_k) {
            (Some(q), Some(k)) => Seqlen { q, k },
            _ => self.seqlen,
        };
        let problem = Problem {
            batch: self.batch,
            seqlen_q: seqlen.q,
            seqlen_k: seqlen.k,
            heads_q: self.heads.q,
            heads_kv: self.heads.kv,
            head_dim: self.headdim.qk,
            head_dim_v: self.headdim.v,
            mask: self.mask.mask(),
            dtype: self.dtype,
            softmax_scale: None,
            softcap: self.softcap,
        };
        problem.check()?;
        Ok(problem)
    }
}

fn pass_values() -> [PossibleValue; 2] {
    [PossibleValue::new("fwd").help("Forward"), PossibleValue::new("bwd").help("Backward (gradients)")]
}

/// Parses `fwd` or `bwd`; whether a backward is deterministic is a flag of its own, which [`pass_of`] adds.
pub fn one_pass() -> impl TypedValueParser<Value = Pass> {
    PossibleValuesParser::new(pass_values())
        .map(|name| if name == "bwd" { Pass::BACKWARD } else { Pass::Forward })
}

/// Parses `fwd`, `bwd` or `both`.
pub fn passes() -> impl TypedValueParser<Value = Mode> {
    let both = PossibleValue::new("both").help("Forward, then backward");
    PossibleValuesParser::new(pass_values().into_iter().chain([both])).try_map(|name| name.parse::<Mode>())
}

/// The pass that `--mode` and `--deterministic` ask for.
///
/// # Errors
/// [`InputError::Usage`] for a deterministic forward: every forward is.
pub fn pass_of(mode: Pass, deterministic: bool) -> Result<Pass, InputError> {
    match mode {
        Pass::Backward { .. } => Ok(Pass::Backward { deterministic }),
        Pass::Forward if deterministic => {
            let message = "--deterministic is about gradients, every forward is: add --mode bwd".to_owned();
            Err(InputError::Usage(message))
        }
        Pass::Forward => Ok(Pass::Forward),
    }
}

fn family_values() -> [PossibleValue; 2] {
    Family::ALL.map(|family| {
        PossibleValue::new(family.name()).help(match family {
            Family::Sm80 => "mma.sync and cp.async: every architecture from 8.0 on",
            Family::Sm90 => "wgmma and TMA: 9.0",
        })
    })
}

/// Parses the name of a family that has kernels.
pub fn family() -> impl TypedValueParser<Value = Family> {
    let planned = PossibleValue::new("sm100").hide(true);
    PossibleValuesParser::new(family_values().into_iter().chain([planned])).try_map(|name| {
        let sm100 = "SM100 kernels are planned for, but do not exist: use --family sm80";
        name.parse::<Family>().map_err(|_| sm100)
    })
}

/// What `fa plan` plans with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanFamily {
    /// Kernels that exist.
    Kernels(Family),
    /// Shapes for tcgen05 and tensor memory, which no kernel computes yet.
    Sm100,
}

impl PlanFamily {
    /// Parses `sm80`, `sm90` or `sm100`.
    pub fn parser() -> impl TypedValueParser<Value = PlanFamily> {
        let sm100 = PossibleValue::new("sm100")
            .help("tcgen05 and tensor memory: 10.0 and 10.3 (planned, no kernel yet)");
        PossibleValuesParser::new(family_values().into_iter().chain([sm100]))
            .map(|name| name.parse().map_or(PlanFamily::Sm100, PlanFamily::Kernels))
    }
}

/// How a result is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people
    Table,
    /// One JSON object
    Json,
    /// Rusty object notation
    Ron,
}

/// `fa plan`.
#[derive(Debug, Args)]
#[command(after_help = PLAN_EXAMPLES)]
pub struct PlanArgs {
    #[command(flatten)]
    pub problem: ProblemArgs,
    /// Read the problem from a RON file instead
    #[arg(long = "problem", value_name = "FILE", conflicts_with_all = [
        "batch", "seqlen", "seqlen_q", "seqlen_k", "heads", "headdim", "causal", "window", "dtype", "softcap"
    ])]
    pub problem_file: Option<PathBuf>,
    /// GPU architecture: sm80, sm86, sm89, sm90, sm100, sm103, sm120, sm121
    #[arg(long, default_value = "sm90")]
    pub arch: Arch,
    /// Kernels to choose from [default: the fastest that the architecture runs]
    #[arg(long, value_parser = PlanFamily::parser())]
    pub family: Option<PlanFamily>,
    /// Judge the one kernel in this RON file instead of searching
    #[arg(long, value_name = "FILE", conflicts_with_all = ["family", "why", "report", "deterministic"])]
    pub spec: Option<PathBuf>,
    /// Which pass to plan
    #[arg(long, value_parser = passes(), default_value = "fwd")]
    pub mode: Mode,
    /// Plan a backward whose gradients have the same bits in every run
    #[arg(long)]
    pub deterministic: bool,
    /// List at most this many plans (tables default to 10, JSON and RON to all)
    #[arg(short = 'n', value_name = "N")]
    pub limit: Option<usize>,
    /// Say what became of the candidates with these fields, as in tile_n=192,num_wg=2
    #[arg(long, value_name = "FIELD=VALUE,..", conflicts_with_all = ["report", "limit"])]
    pub why: Option<String>,
    /// Write one self-contained HTML page about the plan
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
    /// How to print
    #[arg(long, value_enum, default_value = "table")]
    pub format: Format,
    /// Short for --format json
    #[arg(long, conflicts_with = "format")]
    pub json: bool,
}

const PLAN_EXAMPLES: &str = "\
Examples:
  fa plan --headdim 128 --seqlen 8192 --heads 16 --causal
  fa plan --headdim 192-128 --mode bwd -n 5 --json
  fa plan --headdim 128 --why tile_n=192
  fa plan --headdim 64 --seqlen 1x65536 --heads 32:8 --arch sm80 --report plan.html";

/// `fa check`.
#[derive(Debug, Args)]
#[command(after_help = CHECK_EXAMPLES)]
pub struct CheckArgs {
    /// The output to judge
    pub a: PathBuf,
    /// The output to judge it by
    pub b: PathBuf,
    /// Compare this tensor (may be repeated) [default: those of out, lse, dq, dk, dv that both files have]
    #[arg(long = "tensor", value_name = "NAME")]
    pub tensors: Vec<String>,
    /// File with q, k, v (and dout): both outputs are judged against an f64 computation on them [default: A or B, when
    /// one of them holds q, k and v]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["atol", "rtol"])]
    pub inputs: Option<PathBuf>,
    #[command(flatten)]
    pub attention: AttentionArgs,
    /// Judge by |a - b| <= atol + rtol |b| instead; no inputs are used
    #[arg(long, value_name = "X", value_parser = parse_tolerance)]
    pub atol: Option<f64>,
    /// See --atol
    #[arg(long, value_name = "X", value_parser = parse_tolerance)]
    pub rtol: Option<f64>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

const CHECK_EXAMPLES: &str = "\
Examples:
  fa check out.safetensors examples/minilm-layer0.safetensors      inputs found in the second file
  fa check a.safetensors b.safetensors --inputs qkv.safetensors --causal
  fa check a.safetensors b.safetensors --atol 1e-3 --rtol 1e-3

The rule: max|out - ref| <= 2 max|low - ref| + one rounding step of the output type at the magnitude of ref, \
where ref is computed in f64 from the inputs and low is the same formula in the inputs' precision (for f32 at \
least 32 rounding steps); both outputs must keep it. Without inputs and tolerances, A may differ from B by 3 \
rounding steps of a 16-bit type, 65 of f32. LSEs may differ by 1e-3 (1e-5 of their magnitude for f32). \
Infinities and NaN must be at the same places.
Exit code 1 when the outputs differ beyond tolerance.";

/// Problem flags of `fa bench` and `fa tune`: every head dim with every mask and length.
#[derive(Clone, Debug, Args)]
pub struct ShapeArgs {
    /// Independent sequences [default: 1]
    #[arg(long, conflicts_with = "tokens")]
    pub batch: Option<usize>,
    /// As many sequences as make this many positions, at least one, instead of --batch
    #[arg(long, value_name = "N")]
    pub tokens: Option<usize>,
    /// Sequence lengths, each N or queries x keys
    #[arg(long, value_name = "N[xM],..", value_delimiter = ',', default_value = "512,1024,2048,4096")]
    pub seqlen: Vec<Seqlen>,
    /// Query heads, and key/value heads if fewer
    #[arg(long, value_name = "Q[:KV]", default_value = "8")]
    pub heads: Heads,
    /// Head dims, each D or D-DV
    #[arg(long, value_name = "D[-DV],..", value_delimiter = ',', default_value = "64")]
    pub headdim: Vec<HeadDim>,
    #[command(flatten)]
    pub mask: MaskArgs,
    /// Both without a mask and with a causal one
    #[arg(long, conflicts_with_all = ["causal", "window"])]
    pub both_masks: bool,
    /// Element type: f32, f16, bf16 [default: bf16 on the GPU, f32 on the CPU]
    #[arg(long)]
    pub dtype: Option<Dtype>,
}

impl ShapeArgs {
    /// Every shape asked for, of type `dtype` unless a flag says otherwise, checked.
    ///
    /// # Errors
    /// [`InputError::Usage`] for a type that nothing computes, and what [`Problem::check`] finds.
    pub fn problems(&self, dtype: Dtype) -> anyhow::Result<Vec<Problem>> {
        let dtype = self.dtype.unwrap_or(dtype);
        if dtype == Dtype::E4m3 {
            return Err(InputError::Usage("e4m3 is not computed: use f32, f16 or bf16".to_owned()).into());
        }
        let masks = if self.both_masks { vec![Mask::FULL, Mask::CAUSAL] } else { vec![self.mask.mask()] };
        let mut problems = Vec::new();
        for &HeadDim { qk, v } in &self.headdim {
            for &mask in &masks {
                for &Seqlen { q: seqlen_q, k: seqlen_k } in &self.seqlen {
                    let batch = match self.tokens {
                        Some(tokens) => (tokens / seqlen_k.max(1)).max(1),
                        None => self.batch.unwrap_or(1),
                    };
                    let problem = Problem {
                        batch,
                        seqlen_q,
                        seqlen_k,
                        heads_q: self.heads.q,
                        heads_kv: self.heads.kv,
                        head_dim: qk,
                        head_dim_v: v,
                        mask,
                        dtype,
                        softmax_scale: None,
                        softcap: None,
                    };
                    problem.check()?;
                    problems.push(problem);
                }
            }
        }
        Ok(problems)
    }

    /// [`ShapeArgs::problems`] for the GPU: of a 16-bit type, bf16 unless a flag says otherwise.
    ///
    /// # Errors
    /// As [`ShapeArgs::problems`], and [`InputError::Usage`] for f32.
    pub fn problems_of_halves(&self) -> anyhow::Result<Vec<Problem>> {
        if self.dtype == Some(Dtype::F32) {
            let message = "no GPU kernel computes in f32: use bf16 or f16".to_owned();
            return Err(InputError::Usage(message).into());
        }
        self.problems(Dtype::Bf16)
    }
}

/// `fa bench`.
#[derive(Debug, Args)]
#[command(after_help = BENCH_EXAMPLES)]
pub struct BenchArgs {
    /// Which implementation to measure (auto: the GPU for 16-bit types where there is one)
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: Backend,
    #[command(flatten)]
    pub shapes: ShapeArgs,
    /// Which pass to measure
    #[arg(long, value_parser = passes(), default_value = "fwd")]
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
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
}

const BENCH_EXAMPLES: &str = "\
Examples:
  fa bench --headdim 128 --seqlen 512,1024,2048 --causal
  fa bench --headdim 64,128 --dtype bf16 --mode both --threads 2 --json bench.json --plot bench.svg
  fa bench --json - --seqlen 1x16384 --heads 32:8
  fa bench --backend cuda --headdim 128 --heads 16 --tokens 16384 --both-masks --peers --plot rates.svg
  fa bench --backend cuda --marks sm90 --peers --json marks.json

Rates count 4 operations per visible (query, key) pair and element of the head dim; the backward counts 2.5 times that.";

/// `fa doctor`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  fa doctor\n  fa doctor --json\n  fa doctor --time")]
pub struct DoctorArgs {
    /// Measure instead what starting up and a call cost on the GPU: with a warm cache, with an empty one, and of the host
    #[arg(long)]
    pub time: bool,
    /// Start up once and say how long it took: the part of --time that runs in a process of its own
    #[arg(long, hide = true, requires = "time")]
    pub start: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `fa completions`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  fa completions bash > ~/.local/share/bash-completion/completions/fa")]
pub struct CompletionsArgs {
    /// The shell
    pub shell: clap_complete::Shell,
}

/// `fa man`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  fa man | man -l -\n  fa man plan > fa-plan.1")]
pub struct ManArgs {
    /// A command, such as plan
    pub command: Option<String>,
}

/// Visible keys before and after a query's own; `None` is no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Before.
    pub left: Option<u32>,
    /// After.
    pub right: Option<u32>,
}

impl FromStr for Window {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let side = |text: &str| match text.trim() {
            "inf" | "-1" => Ok(None),
            number => number.parse().map(Some).map_err(|_| {
                format!("'{number}' is no count of keys: use a number up to {} or 'inf'", u32::MAX)
            }),
        };
        let (left, right) = text.split_once(',').ok_or("needs two sides, as in 256,0")?;
        Ok(Window { left: side(left)?, right: side(right)? })
    }
}

/// Queries and keys per sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seqlen {
    /// Queries.
    pub q: usize,
    /// Keys.
    pub k: usize,
}

/// Query heads and key/value heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub q: usize,
    /// Key/value heads.
    pub kv: usize,
}

/// Head dims of Q and K, and of V and O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadDim {
    /// Of Q and K.
    pub qk: usize,
    /// Of V and O.
    pub v: usize,
}

/// Parses `N` or `N<separator>M`; one number stands for both.
fn pair(text: &str, separator: char, form: &str) -> Result<(usize, usize), String> {
    let number = |part: &str| {
        part.trim().parse::<usize>().map_err(|_| format!("'{part}' is no whole number: use {form}"))
    };
    match text.split_once(separator) {
        Some((first, second)) => Ok((number(first)?, number(second)?)),
        None => number(text).map(|n| (n, n)),
    }
}

impl FromStr for Seqlen {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        pair(text, 'x', "N or QxK, as in 1x4096").map(|(q, k)| Seqlen { q, k })
    }
}

impl FromStr for Heads {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        pair(text, ':', "Q or Q:KV, as in 32:8").map(|(q, kv)| Heads { q, kv })
    }
}

impl FromStr for HeadDim {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        pair(text, '-', "D or D-DV, as in 192-128").map(|(qk, v)| HeadDim { qk, v })
    }
}

fn parse_layout(text: &str) -> Result<TensorLayout, String> {
    match text.to_ascii_lowercase().as_str() {
        "bshd" => Ok(TensorLayout::Bshd),
        "bhsd" => Ok(TensorLayout::Bhsd),
        _ => Err(format!("unknown layout '{text}': use bshd or bhsd")),
    }
}

fn parse_tolerance(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("must be a number, 0 or more".to_owned()),
    }
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 3600.0 => Ok(value),
        _ => Err("must be above 0 and at most 3600".to_owned()),
    }
}

impl AttentionArgs {
    /// Whether any flag but the layout is given.
    pub fn describes_a_problem(&self) -> bool {
        self.mask.causal || self.mask.window.is_some() || self.scale.is_some() || self.softcap.is_some()
    }

    /// The layout: the flag's, else the file's metadata entry, else BSHD.
    ///
    /// # Errors
    /// [`InputError::Usage`] when the metadata names a layout that does not exist.
    pub fn layout(&self, from_file: Option<&str>) -> Result<TensorLayout, InputError> {
        match (self.layout, from_file) {
            (Some(layout), _) => Ok(layout),
            (None, Some(text)) => parse_layout(text)
                .map_err(|e| InputError::Usage(format!("the file's metadata: {e}, or give --layout"))),
            (None, None) => Ok(TensorLayout::default()),
        }
    }
}
