//! The flags of `fa dist`.

use clap::{Args, Subcommand, ValueEnum};
use fa_core::{Arch, Dtype, Lengths, Problem, Types};
use fa_dist::MAX_WORLD;
use fa_dist::cost::{Link, Machine};
use fa_lab::shape::{HeadDim, whole};
use fa_planner::Mode;

use crate::flags::mods::ModArgs;
use crate::flags::{Heads, MaskArgs, Seqlen, passes};

/// `fa dist`.
#[derive(Debug, Args)]
#[command(after_help = DIST_EXAMPLES)]
pub(crate) struct DistArgs {
    #[command(subcommand)]
    pub command: DistCommand,
}

const DIST_EXAMPLES: &str = "\
Examples:
  fa dist plan --ranks 8 --seqlen 131072 --heads 32:8 --causal
  fa dist check --ranks 2           beside one GPU, with ranks that end and ranks that disagree
  fa dist bench --ranks 2           beside one GPU that computes the same, in the same run";

const PLAN_EXAMPLES: &str = "\
Examples:
  fa dist plan --ranks 8 --seqlen 131072 --heads 32:8 --causal
  fa dist plan --ranks 2 --seqlen 1x1048576 --heads 32:8 --causal --link pcie
  fa dist plan --ranks 2 --seqlen 32768 --causal --mask-mod 'q // 5000 == k // 5000'
  fa dist plan --mode both --link network --link-rate 25 --json";

const CHECK_EXAMPLES: &str = "\
Examples:
  fa dist check --ranks 2           beside one GPU, with ranks that end and ranks that disagree
  fa dist check --repeat 200        200 runs with the same bits
  fa dist check --only packed       packed sequences alone
  fa dist check --transport copies                 without NCCL: on one GPU, too
  fa dist check --transport network                over sockets, as between machines
  fa dist check --transport memory --ranks 4       threads on the CPU, without a GPU";

const BENCH_EXAMPLES: &str = "\
Examples:
  fa dist bench --ranks 2           beside one GPU that computes the same, in the same run
  fa dist bench --only decode --steps              where the time of a decode goes
  fa dist bench --ranks 4 --quick --json";

/// The commands of `fa dist`.
#[derive(Debug, Subcommand)]
pub(crate) enum DistCommand {
    /// Predict every scheme for a problem over several GPUs, and say what is hidden under what
    #[command(after_help = PLAN_EXAMPLES)]
    Plan(PlanArgs),
    /// Compare several GPUs of this machine with one of them, and test what happens when a rank fails
    #[command(after_help = CHECK_EXAMPLES)]
    Check(CheckArgs),
    /// Measure several GPUs of this machine beside one of them
    #[command(after_help = BENCH_EXAMPLES)]
    Bench(BenchArgs),
    /// One rank of `fa dist check` and `fa dist bench`, whose jobs are on standard input
    #[command(hide = true)]
    Rank,
}

/// What is between GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LinkName {
    /// NVLink through a switch, 330 GB/s each way
    Nvlink,
    /// PCIe 5.0, 50 GB/s each way
    Pcie,
    /// A network of 400 Gb/s for each GPU
    Network,
}

/// `fa dist plan`.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// GPUs, each of which has a part of the sequence
    #[arg(long, default_value_t = 8, value_parser = planned)]
    pub ranks: usize,
    /// Independent sequences
    #[arg(long, default_value_t = 1, value_parser = whole::<usize>)]
    pub batch: usize,
    /// Sequence length over all GPUs, or queries x keys as in 1x1048576
    #[arg(long, value_name = "N[xM]", default_value = "131072")]
    pub seqlen: Seqlen,
    /// Query heads, and key/value heads if fewer
    #[arg(long, value_name = "Q[:KV]", default_value = "32:8")]
    pub heads: Heads,
    /// Head dim, and the values' if different, as in 192-128
    #[arg(long, value_name = "D[-DV]", default_value = "128")]
    pub headdim: HeadDim,
    #[command(flatten)]
    pub mask: MaskArgs,
    /// A mask of your own, as an expression of b, h, q, k, sq, sk and off, as in "q // 5000 == k // 5000":
    /// rows are then dealt in both ways; see docs/programs.md
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub mask_mod: Option<String>,
    /// Element type: bf16, f16
    #[arg(long, default_value = "bf16", value_parser = sixteen_bits)]
    pub dtype: Dtype,
    /// GPU architecture
    #[arg(long, default_value = "sm90")]
    pub arch: Arch,
    /// What is between the GPUs
    #[arg(long, value_enum, default_value = "nvlink")]
    pub link: LinkName,
    /// Rate of the link in GB/s each way, instead of that of --link
    #[arg(long, value_name = "GB/S", value_parser = positive)]
    pub link_rate: Option<f64>,
    /// Latency of a transfer in microseconds, instead of that of --link
    #[arg(long, value_name = "US", value_parser = positive)]
    pub link_latency: Option<f64>,
    /// Which pass to plan [default: fwd]
    #[arg(long, value_parser = passes())]
    pub mode: Option<Mode>,
    /// Chunks of a sequence dealt one by one instead of first with last
    #[arg(long)]
    pub contiguous: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// What ranks send by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TransportName {
    /// Copies where all GPUs are peers of one another, else NCCL
    Auto,
    /// What NCCL chooses: NVLink or PCIe between the GPUs of a machine
    Nccl,
    /// Copies out of other ranks' memory, by copy engines: also of ranks that share a GPU
    Copies,
    /// NCCL over the network alone, as between machines (NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1)
    Network,
    /// Memory: threads on the CPU, without a GPU
    Memory,
}

/// `fa dist check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub run: RunArgs,
    /// Runs of every shape, whose bits have to be equal
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = runs)]
    pub repeat: usize,
}

/// `fa dist bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub run: RunArgs,
    /// Print the steps of a pass, too: when each begins on each rank, and how long it takes
    #[arg(long, conflicts_with = "json")]
    pub steps: bool,
}

/// `fa dist check` and `fa dist bench`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// GPUs: a process for each. Where there are fewer ranks share them, and send by copies
    #[arg(long, default_value_t = 2, value_parser = gpus)]
    pub ranks: usize,
    /// Ranks that are threads of one process, of which none can be killed
    #[arg(long)]
    pub threads: bool,
    /// What ranks send by
    #[arg(long, value_enum, default_value = "auto")]
    pub transport: TransportName,
    /// Fewer shapes
    #[arg(long)]
    pub quick: bool,
    /// Only shapes whose line has this text, as packed, sinks, program or ring; a check then ends no rank. Of
    /// a check `faults` are ranks that fail alone or disagree, `killed` those that are ended at each stage
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    /// Print JSON lines
    #[arg(long)]
    pub json: bool,
    /// Seconds after which ranks are ended, and so is a transfer that waits
    #[arg(long, value_name = "S", default_value_t = 120, value_parser = seconds)]
    pub deadline: u64,
}

/// GPUs of one machine.
fn gpus(text: &str) -> Result<usize, String> {
    Some(whole::<usize>(text)?)
        .filter(|count| (1..=64).contains(count))
        .ok_or_else(|| "use 1 to 64".to_owned())
}

/// GPUs that a plan may have.
fn planned(text: &str) -> Result<usize, String> {
    let given = Some(whole::<usize>(text)?).filter(|count| (1..=MAX_WORLD).contains(count));
    given.ok_or_else(|| format!("use 1 to {MAX_WORLD}"))
}

/// A type that several GPUs compute in.
fn sixteen_bits(text: &str) -> Result<Dtype, String> {
    let dtype = text.parse().ok().filter(|dtype: &Dtype| dtype.is_half());
    dtype.ok_or_else(|| "use bf16 or f16".to_owned())
}

/// Runs that are compared.
fn runs(text: &str) -> Result<usize, String> {
    let given = Some(whole::<usize>(text)?).filter(|count| (2..=100_000).contains(count));
    given.ok_or_else(|| "use 2 to 100000".to_owned())
}

/// Seconds, up to a day.
fn seconds(text: &str) -> Result<u64, String> {
    let given = Some(whole::<u64>(text)?).filter(|seconds| (1..=86_400).contains(seconds));
    given.ok_or_else(|| "use 1 to 86400, which is a day".to_owned())
}

/// A finite number above 0.
fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| format!("'{text}' is not a number above 0"))
}

impl PlanArgs {
    /// The GPUs and their link.
    pub(super) fn machine(&self) -> Machine {
        let named = match self.link {
            LinkName::Nvlink => Link::NVLINK,
            LinkName::Pcie => Link::PCIE,
            LinkName::Network => Link::NETWORK,
        };
        let link = Link {
            rate: self.link_rate.map_or(named.rate, |rate| rate * 1e9),
            latency: self.link_latency.map_or(named.latency, |latency| latency * 1e-6),
        };
        Machine { arch: self.arch, link }
    }

    /// The whole problem.
    ///
    /// # Errors
    /// A text that is no mask.
    pub(super) fn problem(&self) -> Result<Problem, String> {
        let mods = ModArgs { mask_mod: self.mask_mod.clone(), ..ModArgs::default() };
        let problem = Problem::new(
            Lengths::uniform(self.batch, self.seqlen.q, self.seqlen.k),
            (self.heads.q, self.heads.kv),
            (self.headdim.qk, self.headdim.v),
            Types::same(self.dtype),
        )
        .with_mask(self.mask.mask());
        Ok(problem.with_score(mods.of(problem.score)?).with_mods_built_in(&[]))
    }
}
