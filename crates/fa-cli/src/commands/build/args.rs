//! The flags of `fa build`.

use std::path::PathBuf;

use fa_core::Arch;
use fa_kernels::{Compiler, CompilerKind};
use fa_lab::configs::HEAD_DIMS;
use fa_lab::shape::HeadDim;
use fa_planner::Mode;
use fa_planner::report::PlanFamily;

use crate::flags;

/// What is built of specs; flags of --all-configs name these, for clap asks for no flag that another rules
/// out.
const OF_SPECS: [&str; 2] = ["specs", "out"];

/// `fa build`.
#[derive(Debug, clap::Args)]
#[command(after_help = BUILD_EXAMPLES)]
pub(crate) struct BuildArgs {
    /// Only for these architectures [default: all that each spec names; sm90 with --all-configs]
    #[arg(long, value_name = "ARCH", value_delimiter = ',')]
    pub arch: Vec<Arch>,
    /// Folder of the cubins and their manifest
    #[arg(short, long, value_name = "DIR", default_value = "dist", conflicts_with = "all_configs")]
    pub out: PathBuf,
    /// Folder of specs in RON (default: those that ship with this program)
    #[arg(long, value_name = "DIR", conflicts_with = "all_configs")]
    pub specs: Option<PathBuf>,
    /// Compile instead every configuration that the planner lists, beside those that miss its register limit
    /// by little, and say what it predicts and what comes out; nothing is written
    #[arg(long)]
    pub all_configs: bool,
    /// Head dims of --all-configs, each D or D-DV
    #[arg(long, value_name = "D[-DV],..", value_delimiter = ',')]
    #[arg(requires = "all_configs", conflicts_with_all = OF_SPECS, default_value = HEAD_DIMS)]
    pub headdim: Vec<HeadDim>,
    /// The pass of --all-configs
    #[arg(long, value_parser = flags::passes(), default_value = "both")]
    #[arg(requires = "all_configs", conflicts_with_all = OF_SPECS)]
    pub mode: Mode,
    /// Of the backward's configurations those whose gradients have the same bits in every run
    #[arg(long, requires = "all_configs", conflicts_with_all = OF_SPECS)]
    pub deterministic: bool,
    /// Kernels of --all-configs [default: the fastest that each architecture runs]
    #[arg(long, value_parser = flags::plan_family())]
    #[arg(requires = "all_configs", conflicts_with_all = OF_SPECS)]
    pub family: Option<PlanFamily>,
    /// Write the table of --all-configs as JSON to this file, '-' for standard output instead of the table
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    #[arg(requires = "all_configs", conflicts_with_all = OF_SPECS)]
    pub json: Option<PathBuf>,
    /// Compile by nvcc instead of NVRTC
    #[arg(long)]
    pub nvcc: bool,
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
  fa build --arch sm90 --specs my-specs/
  fa build --all-configs --headdim 128 --mode bwd

Exit code 1 when a kernel that should does not compile cleanly: without spills, serialised wgmma and ignored \
setmaxnreg.";
