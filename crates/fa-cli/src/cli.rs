//! The command line as a whole: the commands and what all of them take.

use clap::{Parser, Subcommand};

use crate::commands::bench::args::BenchArgs;
use crate::commands::build::BuildArgs;
use crate::commands::check::CheckArgs;
use crate::commands::doctor::DoctorArgs;
use crate::commands::emulate::EmulateArgs;
use crate::commands::ladder::LadderArgs;
use crate::commands::manual::{CompletionsArgs, ManArgs};
use crate::commands::plan::PlanArgs;
use crate::commands::records::RecordsArgs;
use crate::commands::run::RunArgs;
use crate::commands::tune::TuneArgs;
use crate::commands::validate::args::ValidateArgs;

/// Plan, run, check and measure attention.
///
/// `fa` plans an attention problem for a GPU architecture (which tiles fit, which is best, and why the others
/// are not) and computes it on the machine at hand.
#[derive(Debug, Parser)]
#[command(name = "fa", version, arg_required_else_help = true)]
#[command(max_term_width = 110, after_help = TOP_EXAMPLES)]
pub(crate) struct Cli {
    /// Show what is going on, on standard error (-v info, -vv debug, -vvv trace)
    #[arg(short, long, global = true, action = clap::ArgAction::Count, display_order = 900)]
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

Environment:
  FA_CACHE_DIR       folder of compiled kernels [default: fa/kernels in the user's cache folder]
  FA_TUNED           table of tuned kernels [default: tuned.ron beside the compiled kernels]
  FA_NVRTC           the NVRTC library, or none to compile nothing [default: searched in CUDA_HOME, \
CUDA_PATH, the loader's path and the active Python environment]
  FA_NVCC            nvcc, for `fa build --nvcc` [default: searched in CUDA_HOME, CUDA_PATH and PATH]
  FA_PYTHON          Python with torch, for `fa bench --peers` [default: python3]
  FA_EMULATOR_CACHE  folder of what `fa emulate` compiles [default: below the user's cache folder]
  CXX                the C++ compiler of `fa emulate` [default: searched]
  RAYON_NUM_THREADS  threads of the CPU [default: all cores]
  NO_COLOR           no colours, if it is not empty

Exit codes: 0 done; 1 a negative verdict or a failure; 2 bad input or usage.";

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
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
    Validate(ValidateArgs),
    /// Run kernels on the CPU, without a GPU, and report races, deadlocks and wrong values
    Emulate(EmulateArgs),
    /// Measure kernels for a problem on this GPU; the library uses the winner from then on
    Tune(TuneArgs),
    /// Measure the kernels' optimisation steps one after the other
    Ladder(LadderArgs),
    /// Run everything that needs a GPU after kernels have changed, in order
    Records(RecordsArgs),
    /// Say what works on this machine, and what to do about what does not
    Doctor(DoctorArgs),
    /// Do the job on standard input: the part of `fa validate` and `fa tune` that works on the GPU
    #[command(hide = true)]
    Worker,
    /// Print a shell's completion script
    Completions(CompletionsArgs),
    /// Print the manual page (roff), of one command if named
    Man(ManArgs),
}
