//! Flags of `fa emulate`.

use std::path::PathBuf;

use clap::Args;
use fa_core::{Alibi, Arch, Dtype, KernelSpec, TensorLayout};
use fa_emu::{Lie, Options};
use fa_kernels::Headers;
use fa_lab::shape::{HeadDim, whole};

use crate::flags::lengths::parse_alibi;
use crate::flags::{Heads, KvArgs, MaskArgs, Seqlen};
use crate::term::failure::InputError;

/// Flags that describe the problem alone.
const OF_PROBLEM: [&str; 27] = [
    "seqlen",
    "batch",
    "lengths",
    "rows_q",
    "rows_k",
    "page",
    "slack",
    "split",
    "alibi",
    "sinks",
    "dropout",
    "dropout_seed",
    "dropout_offset",
    "mask_mod",
    "score_mod",
    "inputs",
    "heads",
    "headdim",
    "kv_descale",
    "out_dtype",
    "causal",
    "window",
    "query_offset",
    "scale",
    "softcap",
    "layout",
    "gap",
];

/// Flags that choose the form of a given kernel, or belong to the one run of it. Other modes use the seed as
/// well.
const OF_RUN: [&str; 10] =
    ["arch", "latent", "dtype", "kv_dtype", "sms", "steps", "json", "report", "cta", "statement"];

/// Flags that --mutate rules out; its own name them too: clap asks for no flag that another rules out.
const OF_NO_REMOVAL: [&str; 9] =
    ["seeds", "sms", "steps", "json", "report", "cta", "headers", "grid", "inputs"];

/// `fa emulate`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct EmulateArgs {
    /// The kernel: a spec as `fa plan --format spec` prints it, or a shipped one
    #[arg(required_unless_present_any = ["sample", "mutate", "random"])]
    pub spec: Option<PathBuf>,
    /// Architecture to compile for [default: the first that the file names, else the kernel's own]
    #[arg(long)]
    #[arg(requires = "spec")]
    pub arch: Option<Arch>,
    /// Sequence length, or queries x keys as in 1x4096 [default: 300, or as --lengths]
    #[arg(long, value_name = "N[xM]")]
    #[arg(requires = "spec")]
    pub seqlen: Option<Seqlen>,
    /// Independent sequences [default: 1, or as --lengths]
    #[arg(long, value_parser = whole::<usize>)]
    #[arg(requires = "spec")]
    pub batch: Option<usize>,
    /// Sequences of these lengths instead of equal ones, using the kernel's variable-length form [default for
    /// kernels of that form: 300,77,0,129,1x300,40x0,200x513]
    #[arg(long, value_name = "N[xM],...", value_delimiter = ',', conflicts_with_all = ["seqlen", "batch"])]
    #[arg(requires = "spec")]
    pub lengths: Vec<Seqlen>,
    /// How the queries of sequences of different lengths lie [default: packed]
    #[arg(long, value_name = "ROWS")]
    #[arg(requires = "spec")]
    pub rows_q: Option<Rows>,
    /// How their keys lie, unless in pages [default: packed]
    #[arg(long, value_name = "ROWS")]
    #[arg(requires = "spec")]
    pub rows_k: Option<Rows>,
    /// Keys in pages of this many, using the kernel's paged form [default for kernels of that form: 16]
    #[arg(long, value_name = "N", conflicts_with = "rows_k")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    #[arg(requires = "spec")]
    pub page: Option<u32>,
    /// Spare rows behind sequences of different lengths, in tensors and bounds; a kernel must not touch them
    /// [default: 5]
    #[arg(long, value_name = "N", value_parser = whole::<usize>)]
    #[arg(requires = "spec")]
    pub slack: Option<usize>,
    /// Divide the keys of each row among CTAs, using the kernel's split form
    #[arg(long)]
    #[arg(requires = "spec")]
    pub split: bool,
    /// ALiBi slopes per query head, or with --alibi=per_sequence_head per sequence and query head, using the
    /// kernel's form with slopes
    #[arg(long, value_name = "SLOPES", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = Alibi::PerHead.name(), value_parser = parse_alibi)]
    #[arg(requires = "spec")]
    pub alibi: Option<Alibi>,
    /// A sink for each head, using the kernel's form with sinks
    #[arg(long)]
    #[arg(requires = "spec")]
    pub sinks: bool,
    /// Probabilities are dropped with probability P after the softmax, as FlashAttention-2 drops them for the
    /// same seed and offset, using the kernel's form with weights
    #[arg(long, value_name = "P")]
    #[arg(requires = "spec")]
    pub dropout: Option<f64>,
    /// The seed of dropout
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u64>)]
    #[arg(requires = "dropout")]
    pub dropout_seed: u64,
    /// The offset of dropout
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u64>)]
    #[arg(requires = "dropout")]
    pub dropout_offset: u64,
    /// A mask of your own, as in docs/programs.md, using the kernel's form with a program: of a band, too,
    /// which fa run computes by the built-in one
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    #[arg(requires = "spec")]
    pub mask_mod: Option<String>,
    /// A change of the scores of your own, likewise
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    #[arg(requires = "spec")]
    pub score_mod: Option<String>,
    /// A safetensors file whose tensors are the program's arrays and scalars, by their names [default: drawn]
    #[arg(long, value_name = "FILE", conflicts_with = "mutate")]
    #[arg(requires = "spec")]
    pub inputs: Option<PathBuf>,
    /// Query heads, and key/value heads if fewer
    #[arg(long, value_name = "Q[:KV]", default_value = "2")]
    #[arg(requires = "spec")]
    pub heads: Heads,
    /// Head dim, and the values' if different, as in 192-128 [default: the kernel's]
    #[arg(long, value_name = "D[-DV]")]
    #[arg(requires = "spec")]
    pub headdim: Option<HeadDim>,
    /// Element type, using the kernel's form of it: bf16, f16; e4m3 of kernels that compute in it [default:
    /// the kernel's]
    #[arg(long)]
    #[arg(requires = "spec")]
    pub dtype: Option<Dtype>,
    /// V is the first columns of K (MLA), using the kernel's form for latents, as in --headdim 576-512
    #[arg(long)]
    #[arg(requires = "spec")]
    pub latent: bool,
    #[command(flatten)]
    pub kv: KvArgs,
    #[command(flatten)]
    pub mask: MaskArgs,
    /// Factor on Q K^T [default: 1/sqrt(head_dim)]
    #[arg(long, value_name = "X")]
    #[arg(requires = "spec")]
    pub scale: Option<f64>,
    /// Soft cap [default for kernels that have one: 15]
    #[arg(long, value_name = "X")]
    #[arg(requires = "spec")]
    pub softcap: Option<f64>,
    /// Order of the tensors' axes
    #[arg(long, default_value = "bshd", value_parser = crate::flags::parse_layout)]
    #[arg(requires = "spec")]
    pub layout: TensorLayout,
    /// Elements between rows, a multiple of 8
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<usize>)]
    #[arg(requires = "spec")]
    pub gap: usize,
    /// Seed of the schedule: 0 completes asynchronous operations at once, 1 as late as possible, others at
    /// random times (may be repeated) [default: 0, 1, 2]; with --random: seed of what is drawn [default: 1]
    #[arg(long = "seed", value_name = "N", value_parser = whole::<u64>)]
    #[arg(conflicts_with = "mutate")]
    pub seeds: Vec<u64>,
    /// SMs of the emulated GPU [default: 2, or 64 for split kernels, which divide keys where SMs idle]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    #[arg(requires = "spec", conflicts_with = "mutate")]
    pub sms: Option<u32>,
    /// Give up after this many steps of the scheduler; 0 for no limit
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u64>)]
    #[arg(requires = "spec", conflicts_with = "mutate")]
    pub steps: u64,
    /// Print one JSON object
    #[arg(long)]
    #[arg(requires = "spec", conflicts_with = "mutate")]
    pub json: bool,
    /// Write a page with the timeline of one CTA
    #[arg(long, value_name = "FILE.html", conflicts_with_all = ["mutate"])]
    #[arg(value_parser = crate::flags::page_file)]
    pub report: Option<PathBuf>,
    /// The CTA of the timeline
    #[arg(long, value_name = "N", default_value_t = 0, requires = "report", value_parser = whole::<u32>)]
    #[arg(conflicts_with_all = ["mutate", "grid"])]
    pub cta: u32,
    /// Device sources instead of the built-in ones, laid out as crates/fa-kernels/cuda: a kernel under
    /// development, or one with an injected fault
    #[arg(long, value_name = "DIR", conflicts_with_all = ["sample", "mutate", "random"])]
    pub headers: Option<PathBuf>,
    /// Run the cases that `fa validate` has for a configuration instead of one problem
    #[arg(long, conflicts_with_all = ["report", "sample", "mutate", "random"])]
    #[arg(conflicts_with_all = OF_PROBLEM)]
    pub grid: bool,
    /// Run this many of the planner's other configurations at awkward shapes, a different sample each day
    #[arg(long, value_name = "N", conflicts_with_all = ["spec", "mutate"])]
    #[arg(conflicts_with_all = OF_PROBLEM, conflicts_with_all = OF_RUN, conflicts_with = "seeds")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub sample: Option<u32>,
    /// The day of the sample [default: today]
    #[arg(long, value_name = "YYYY-MM-DD", requires = "sample")]
    #[arg(conflicts_with_all = ["spec", "mutate", "random"], value_parser = crate::flags::day)]
    pub day: Option<String>,
    /// Run this many kernels drawn at random (the planner's first choices, its other candidates, some with a
    /// switch changed), each on random problems that it computes
    #[arg(long, value_name = "N", conflicts_with_all = ["spec", "mutate", "sample"])]
    #[arg(conflicts_with_all = OF_PROBLEM, conflicts_with_all = OF_RUN)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub random: Option<u32>,
    /// With --random: the number of the first kernel to draw, as a report counts them [default: 0]
    #[arg(long, value_name = "TURN", conflicts_with = "spec", value_parser = clap::value_parser!(u32))]
    pub from: Option<u32>,
    /// With --random: only these kernels, as in sm90_bwd
    #[arg(long, value_name = "KERNEL,..", value_delimiter = ',')]
    #[arg(conflicts_with = "spec", value_parser = fa_emu::random::KERNELS)]
    pub kernels: Vec<String>,
    /// With --random: append a line of JSON for each kernel to this file and skip the kernels that it has, so
    /// that a stopped run can be resumed
    #[arg(long, value_name = "FILE", conflicts_with = "spec")]
    pub log: Option<PathBuf>,
    /// Remove every synchronising statement of the kernels (or of SPEC), one at a time, and list those
    /// whose removal nothing notices
    #[arg(long)]
    pub mutate: bool,
    /// With --mutate: only statements whose location contains this, as in sm90/fwd.cuh:120
    #[arg(long, value_name = "TEXT", requires = "mutate", conflicts_with_all = OF_NO_REMOVAL)]
    pub statement: Option<String>,
    /// Removals known to go unnoticed, with the reasons; any other is a negative verdict [default, where
    /// there is one: docs/results/emulation-survivors.ron]
    #[arg(long, value_name = "FILE", requires = "mutate")]
    #[arg(conflicts_with_all = ["sample", "random"], conflicts_with_all = OF_NO_REMOVAL)]
    pub survivors: Option<PathBuf>,
    /// With --mutate: the removals tried so far. Removals from unchanged code are not tried again, others are
    /// added one by one, so that a stopped run can be resumed [default, unless SPEC is named:
    /// target/removals.ron]
    #[arg(long, value_name = "FILE", requires = "mutate")]
    #[arg(conflicts_with_all = ["sample", "random"], conflicts_with_all = OF_NO_REMOVAL)]
    pub tried: Option<PathBuf>,
    /// Threads for --sample, --random and --mutate [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub threads: Option<u16>,
}

const EXAMPLES: &str = "\
Examples:
  fa emulate crates/fa-kernels/specs/sm90/hd128-causal-bf16.ron --seqlen 300
  fa emulate my.ron --seqlen 113x203 --heads 4:2 --seed 7 --json
  fa emulate my.ron --grid                                 the cases of fa validate --all-configs
  fa emulate my.ron --headers my/cuda                      device sources that are being written
  fa emulate my.ron --seqlen 600 --report timeline.html    one CTA's loads, products and waits
  fa emulate my.ron --kv-dtype e4m3 --kv-descale token_head       the kernel's form for caches of codes
  fa emulate my.ron --lengths 300,1x77,0x40 --page 16 --sinks     packed queries, keys in pages, sinks
  fa emulate my.ron --mask-mod 'array d: i32[_]; d[q] == d[k]' --inputs documents.safetensors
  fa emulate --random 200 --seed 7 --log random.jsonl      kernels and problems drawn at random
  fa emulate --mutate                                      is the removal of each barrier noticed?

Needs a C++ compiler (g++ 11 or clang++ 14 and later; CXX names another), and no GPU. What it
compiles is kept in fa/emulator in the user's cache folder, or in FA_EMULATOR_CACHE. Finds data
races, missing fences, uninitialised reads, accesses out of bounds, deadlocks and wrong values, with
the line of the kernel. It says nothing about speed, spills, or the rounding within a tensor core.
Exit code 1 when anything is found. `fa prove --tier emulated` runs the shipped kernels that have changed.";

/// How the rows of one side lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Rows {
    /// End to end
    Packed,
    /// In slots end to end, of which each sequence uses a part
    PackedUsed,
    /// In slots of equal size, of which each sequence uses a part
    Padded,
}

impl Rows {
    pub(super) fn lie(self) -> Lie {
        match self {
            Rows::Packed => Lie::Packed,
            Rows::PackedUsed => Lie::PackedUsed,
            Rows::Padded => Lie::Padded,
        }
    }
}

impl EmulateArgs {
    /// SMs of the emulated GPU.
    pub(super) fn sms_for(&self, spec: &KernelSpec) -> u32 {
        self.sms.unwrap_or_else(|| Options::sms_of(spec))
    }

    /// The device sources.
    pub(super) fn headers(&self) -> anyhow::Result<Headers> {
        match &self.headers {
            Some(folder) if folder.is_dir() => Ok(Headers::from_dir(folder)?),
            Some(folder) => {
                let message = format!("--headers {}: there is no such folder", folder.display());
                Err(InputError::Usage(message).into())
            }
            None => Ok(Headers::current()?),
        }
    }

    /// Threads that prove kernels.
    pub(super) fn workers(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, |count| count.get());
        self.threads.map_or_else(cores, usize::from)
    }
}
