//! The flags of `fa build`.

use std::path::PathBuf;

use fa_core::Arch;
use fa_kernels::{Compiler, CompilerKind};
use fa_lab::configs::HEAD_DIMS;
use fa_lab::shape::HeadDim;
use fa_planner::Mode;
use fa_planner::report::PlanFamily;

use crate::flags::{self, HeadersArgs};

/// What is built from specs. Flags of --all-configs and --best name these as well: clap does not require a
/// flag that conflicts with another.
const OF_BEST: [&str; 11] = [
    "specs",
    "common",
    "out",
    "arch",
    "all_configs",
    "headdim",
    "mode",
    "deterministic",
    "family",
    "json",
    "emit",
];
const OF_LISTED: [&str; 5] = ["specs", "common", "out", "best", "emit"];

/// `fa build`.
#[derive(Debug, clap::Args)]
#[command(after_help = BUILD_EXAMPLES)]
pub(crate) struct BuildArgs {
    /// Only for these architectures [default: all that each spec names; sm90 with --all-configs]
    #[arg(long, value_name = "ARCH", value_delimiter = ',')]
    pub arch: Vec<Arch>,
    /// Folder of the cubins and their manifest
    #[arg(short, long, value_name = "DIR", default_value = "dist")]
    #[arg(conflicts_with_all = ["all_configs", "best"])]
    pub out: PathBuf,
    /// Folder of specs in RON (default: those that ship with this program)
    #[arg(long, value_name = "DIR", conflicts_with_all = ["all_configs", "best"])]
    pub specs: Option<PathBuf>,
    /// Also the kernels that the planner chooses for common problems (head dims 64, 128 and 256, bf16 and
    /// f16, dense, packed and on pages, and gradients): of each architecture the N that most of them run
    #[arg(long, value_name = "N", requires = "arch", conflicts_with_all = ["all_configs", "best", "emit"])]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub common: Option<u16>,
    /// Compile every configuration that the planner lists instead, and those that exceed its register limit
    /// by little, and show prediction and result side by side; nothing is written
    #[arg(long)]
    pub all_configs: bool,
    /// Head dims for --all-configs, each D or D-DV
    #[arg(long, value_name = "D[-DV],..", value_delimiter = ',')]
    #[arg(requires = "all_configs", conflicts_with_all = OF_LISTED, default_value = HEAD_DIMS)]
    pub headdim: Vec<HeadDim>,
    /// The pass for --all-configs
    #[arg(long, value_parser = flags::passes(), default_value = "both")]
    #[arg(requires = "all_configs", conflicts_with_all = OF_LISTED)]
    pub mode: Mode,
    /// Only backward configurations whose gradients have the same bits in every run
    #[arg(long, requires = "all_configs", conflicts_with_all = OF_LISTED)]
    pub deterministic: bool,
    /// Kernel family for --all-configs [default: the fastest that each architecture runs]
    #[arg(long, value_parser = flags::plan_family())]
    #[arg(requires = "all_configs", conflicts_with_all = OF_LISTED)]
    pub family: Option<PlanFamily>,
    /// With --all-configs: write the table as JSON to this file, '-' for standard output instead of the table
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    #[arg(requires = "all_configs", conflicts_with_all = OF_LISTED)]
    pub json: Option<PathBuf>,
    /// Compile the planner's best N kernels instead for every kind of problem (passes, families, head dims,
    /// masks, types, 8 bits, packed, paged, decoding, soft caps, slopes, sinks), except those that an earlier
    /// run has compiled
    #[arg(long, value_name = "N", conflicts_with_all = ["all_configs", "arch"])]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub best: Option<u16>,
    /// With --best: problems drawn at random instead, this many for each family and architecture
    #[arg(long, value_name = "N", requires = "best", conflicts_with_all = OF_BEST)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub random: Option<u16>,
    /// With --random: the same seed draws the same problems
    #[arg(long, value_name = "S", default_value_t = 0, requires = "random", conflicts_with_all = OF_BEST)]
    pub seed: u64,
    /// With --best: only kernels whose names contain this, as in sm90_bwd or varlen
    #[arg(long, value_name = "TEXT", requires = "best", conflicts_with_all = OF_BEST)]
    pub filter: Option<String>,
    /// With --best: the results folder, where configs/refused-COMPILER.txt is written
    #[arg(long, value_name = "DIR", default_value = "docs/results")]
    #[arg(requires = "best", conflicts_with_all = OF_BEST)]
    pub results: PathBuf,
    /// With --best: bring this set of known refusals up to date, as the planner's own
    /// (crates/fa-planner/src/refusals); kernels that are known to be refused are compiled as well
    #[arg(long, value_name = "FILE", requires = "best", conflicts_with_all = OF_BEST)]
    pub refusals: Option<PathBuf>,
    /// With --best: folder with a line for every kernel compiled so far, from which a stopped run is resumed
    #[arg(long, value_name = "DIR", default_value = "target/records")]
    #[arg(requires = "best", conflicts_with_all = OF_BEST)]
    pub state: PathBuf,
    /// Threads for --best [default: all cores]
    #[arg(long, value_name = "N", requires = "best", conflicts_with_all = OF_BEST)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub threads: Option<u16>,
    /// Compile by nvcc instead of NVRTC
    #[arg(long)]
    pub nvcc: bool,
    /// Write texts of each kernel to --out instead: its source with the headers that it includes, its PTX, or
    /// its machine code (by nvdisasm)
    #[arg(long, value_enum, value_name = "TEXT,..", value_delimiter = ',')]
    #[arg(conflicts_with_all = ["all_configs", "best"])]
    pub emit: Vec<Emitted>,
    #[command(flatten)]
    pub headers: HeadersArgs,
}

/// A text of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Emitted {
    /// CUDA C++
    Source,
    /// PTX
    Ptx,
    /// SASS
    Sass,
}

impl BuildArgs {
    /// The compiler that they ask for.
    ///
    /// # Errors
    /// Where it is not found.
    pub(crate) fn compiler(&self) -> Result<Compiler, fa_kernels::Error> {
        Compiler::find(if self.nvcc { CompilerKind::Nvcc } else { CompilerKind::Nvrtc })
    }
}

const BUILD_EXAMPLES: &str = "\
Examples:
  fa build --out dist
  fa build --arch sm90 --common 200             and what common problems run, for a wheel
  fa build --arch sm90 --specs my-specs/
  fa build --specs my-specs/ --headers my/cuda --emit source,ptx,sass --out texts
  fa build --all-configs --headdim 128 --mode bwd
  fa build --best 10                            what spills among the planner's best ten
  fa build --best 10 --refusals crates/fa-planner/src/refusals/nvrtc-13.0.txt
  fa build --best 1 --random 200 --seed 1       what spills among first choices for problems at random

Exit code 1 when a kernel fails to compile, or compiles with spills, serialised wgmma or an ignored \
setmaxnreg.";
