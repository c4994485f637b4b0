//! The command line as a whole: the commands and what all of them take.

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::commands::bench::args::BenchArgs;
use crate::commands::build::BuildArgs;
use crate::commands::check::CheckArgs;
use crate::commands::check_mod::CheckModArgs;
use crate::commands::dist::DistArgs;
use crate::commands::doctor::DoctorArgs;
use crate::commands::emulate::EmulateArgs;
use crate::commands::ladder::LadderArgs;
use crate::commands::manual::{CompletionsArgs, ManArgs};
use crate::commands::plan::PlanArgs;
use crate::commands::prove::ProveArgs;
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

impl Cli {
    /// The command line of this process.
    ///
    /// # Errors
    /// What is wrong with it, and requests for help.
    pub(crate) fn given() -> Result<Cli, clap::Error> {
        let mut matches = taking_negative_numbers(Cli::command()).try_get_matches()?;
        Cli::from_arg_matches_mut(&mut matches)
    }
}

/// A command whose flags judge negative numbers themselves: to clap they are unknown flags.
fn taking_negative_numbers(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| {
        let takes = arg.get_long().is_some() && arg.get_action().takes_values();
        arg.allow_negative_numbers(takes)
    });
    command.mut_subcommands(taking_negative_numbers)
}

const TOP_EXAMPLES: &str = "\
Examples:
  fa run examples/minilm-layer0.safetensors           compute attention on Q, K, V of a real layer
  fa plan --headdim 128 --seqlen 8192 --causal        the best kernels for H100, and their limits
  fa check out.safetensors other.safetensors          are two outputs equal within tolerance?
  fa doctor                                           what works on this machine

Environment:
  FA_CACHE_DIR       folder of compiled kernels [default: fa/kernels in the user's cache folder]
  FA_TUNE            auto, auto:SECONDS or off: measure kernels in the background of calls [default: off]
  FA_TUNED           table of tuned kernels [default: tuned.json beside the compiled kernels]
  FA_NVRTC           the NVRTC library, or none to compile nothing [default: searched in CUDA_HOME, \
CUDA_PATH, the loader's path and the active Python environment]
  FA_NCCL            the NCCL library, for `fa dist` [default: searched as NVRTC is]
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
    /// Say what a mask or a modification of scores is: its class, derivative, cost and tiles
    CheckMod(CheckModArgs),
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
    /// Prove the kernels that have changed, by emulation or on a GPU, and keep the ledger of proofs
    Prove(ProveArgs),
    /// Run everything that needs a GPU after kernels have changed, in order
    Records(RecordsArgs),
    /// Plan, check and measure attention over several GPUs
    Dist(DistArgs),
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

#[cfg(test)]
mod tests {
    use clap::Arg;
    use clap::error::{ContextKind, ErrorKind};

    use super::*;

    /// Something that each flag takes: the first of these that it accepts.
    const VALUES: [&str; 25] = [
        "head",
        "e4m3",
        "1",
        "64",
        "bf16",
        "sm90",
        "fwd",
        "x.svg",
        "x.html",
        "x.md",
        "x.json",
        "cpu",
        "full",
        "bshd",
        "avx2",
        "tile_n=64",
        "fa3",
        "1,1",
        "2026-01-01",
        "windows",
        "per_head",
        "sm80_fwd",
        "h100",
        "quick",
        "1x1",
    ];

    /// What clap says of a command line.
    fn parse(line: &[String]) -> Result<(), clap::Error> {
        Cli::command().try_get_matches_from(line).map(drop)
    }

    /// `fa COMMAND`, with something for each position where it asks for one.
    fn start(command: &clap::Command) -> Vec<String> {
        let bare = vec!["fa".to_owned(), command.get_name().to_owned()];
        match parse(&bare) {
            Ok(()) => bare,
            Err(_) => bare.into_iter().chain(command.get_positionals().map(|_| "x".to_owned())).collect(),
        }
    }

    /// A flag as it is written, with a value where it takes one.
    fn given(start: &[String], flag: &Arg) -> String {
        let name = format!("--{}", flag.get_long().expect("a flag has a name"));
        if !flag.get_action().takes_values() {
            return name;
        }
        let possible = flag.get_possible_values();
        let possible = possible.iter().map(|value| value.get_name());
        let mut written = possible.chain(VALUES).map(|value| format!("{name}={value}"));
        let wrong = [ErrorKind::InvalidValue, ErrorKind::ValueValidation];
        let accepted = written.find(|flag| {
            let line = [start, std::slice::from_ref(flag)].concat();
            parse(&line).err().is_none_or(|error| !wrong.contains(&error.kind()))
        });
        accepted.unwrap_or_else(|| panic!("{name} takes none of {VALUES:?}"))
    }

    /// clap asks for no flag that another one rules out: what belongs to it would be read and ignored. So
    /// whoever is refused alone is refused beside every other flag, but the one that is asked for.
    #[test]
    fn what_belongs_to_an_absent_flag_is_refused_beside_any_other() {
        let mut ignored = Vec::new();
        for command in Cli::command().get_subcommands() {
            let start = start(command);
            let flags: Vec<&Arg> = command.get_arguments().filter(|arg| arg.get_long().is_some()).collect();
            let written: Vec<String> = flags.iter().map(|flag| given(&start, flag)).collect();
            for flag in &written {
                let alone = [start.as_slice(), std::slice::from_ref(flag)].concat();
                let Err(error) = parse(&alone) else { continue };
                if error.kind() != ErrorKind::MissingRequiredArgument {
                    continue;
                }
                let asked = format!("{:?}", error.get(ContextKind::InvalidArg));
                for (other, arg) in written.iter().zip(&flags) {
                    let name = arg.get_long().expect("a flag has a name");
                    let is_asked =
                        [" ", "\"", "|", ">"].iter().any(|end| asked.contains(&format!("--{name}{end}")));
                    if other == flag || is_asked {
                        continue;
                    }
                    let beside = [alone.as_slice(), std::slice::from_ref(other)].concat();
                    if parse(&beside).is_ok() {
                        ignored.push(beside.join(" "));
                    }
                }
            }
        }
        assert!(ignored.is_empty(), "{ignored:#?}");
    }

    /// What `fa plan` reads beside a problem.
    const OF_PLANS: [&str; 11] = [
        "arch",
        "board",
        "family",
        "spec",
        "mode",
        "deterministic",
        "num-results",
        "why",
        "report",
        "format",
        "json",
    ];

    /// A command that does something else with a flag refuses all flags that it then would not read.
    #[test]
    fn flags_that_change_what_a_command_does_leave_none_unread() {
        let mut ignored = Vec::new();
        for (line, read) in [
            ("bench --draw=x --plot=x.svg", &["plot"][..]),
            ("plan --problem=x", &OF_PLANS),
            (
                "plan --guide",
                &["headdim", "arch", "mode", "num-results", "format", "json", "tile-m", "tile-n", "explain"],
            ),
            ("bench --append", &["backend", "seconds", "reps", "headers", "dtype", "json"]),
            ("tune --judge=x", &["json", "report"]),
            ("emulate --sample=1", &["day", "threads", "from", "kernels", "log"]),
            ("emulate --random=1", &["seed", "from", "kernels", "log", "threads"]),
            ("ladder --draw=x --plot=x.svg", &["plot"]),
            ("ladder --published", &[]),
            ("records --summarise=x", &["results"]),
            ("records --tables", &["results", "check"]),
            ("doctor --notices", &[]),
        ] {
            let line: Vec<String> = format!("fa {line}").split(' ').map(str::to_owned).collect();
            let command = Cli::command();
            let command = command.find_subcommand(&line[1]).expect("a command");
            parse(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"));
            for flag in command.get_arguments() {
                let Some(name) = flag.get_long() else { continue };
                let is_of_line = line.iter().any(|own| own.split('=').next() == Some(&format!("--{name}")));
                if is_of_line || read.contains(&name) {
                    continue;
                }
                let beside = [&line[..], &[given(&line[..2], flag)]].concat();
                if parse(&beside).is_ok() {
                    ignored.push(beside.join(" "));
                }
            }
        }
        assert!(ignored.is_empty(), "{ignored:#?}");
    }
}
