//! `fa ladder`: what each optimisation step brings on the GPU at hand.

pub(crate) mod draw;
mod table;

use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use fa_core::{Arch, Family};
use fa_lab::ladder::{self, Options, profile, published};
use fa_lab::runner::Turns;
use fa_lab::shape::HeadDim;

use crate::draw::record;
use crate::term::destinations::Destinations;
use crate::term::failure::{InputError, Verdict};
use crate::term::{output, progress};

/// Flags of rates, which a profile has none of.
const OF_RATES: [&str; 5] = ["reps", "plot", "draw", "peers", "published"];

/// `fa ladder`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct LadderArgs {
    /// The kernels whose steps are measured
    #[arg(long, alias = "arch", value_parser = family(), default_value = "sm80")]
    pub family: Family,
    /// Sequence lengths [default: 1k to 16k for sm80, 4096 for sm90]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub seqlen: Vec<u32>,
    /// Head dims of the sm90 kernels [default: 128]
    #[arg(long, value_name = "D[-DV],..", value_delimiter = ',')]
    pub headdim: Vec<HeadDim>,
    /// Timed launches of each step, in rounds of about six
    #[arg(long, value_name = "N", default_value_t = 24)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub reps: u16,
    /// Time the peer of a ladder that has one beside its steps (torch, in the Python of FA_PYTHON)
    #[arg(long)]
    pub peers: bool,
    /// Show registers, occupancy and planned shares of every step instead of rates, and with --ncu what
    /// Nsight Compute counts
    #[arg(long, conflicts_with_all = OF_RATES)]
    pub profile: bool,
    /// With --profile: run every step under Nsight Compute, `ncu` or the program given
    #[arg(long, value_name = "PROGRAM", num_args = 0..=1, default_missing_value = "ncu")]
    #[arg(requires = "profile", conflicts_with_all = OF_RATES)]
    pub ncu: Option<PathBuf>,
    /// With --profile: the architecture that steps are compiled for
    #[arg(long, value_name = "ARCH", default_value = "sm90")]
    #[arg(requires = "profile", conflicts_with_all = OF_RATES)]
    pub target: Arch,
    /// Print published ladders' rates by board beside what is planned there, as Markdown; nothing is measured
    #[arg(long, conflicts_with_all = ["family", "seqlen", "headdim", "reps", "json"])]
    #[arg(conflicts_with_all = ["plot", "draw", "peers"])]
    pub published: bool,
    /// Write the rows as JSON to this file, '-' for standard output instead of the table
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub json: Option<PathBuf>,
    /// Draw the steps to an SVG file
    #[arg(long, value_name = "FILE.svg", value_parser = crate::flags::plot_file)]
    pub plot: Option<PathBuf>,
    /// Draw the plot of this record, which --json wrote before; nothing is measured
    #[arg(long, value_name = "RECORD.json", requires = "plot")]
    #[arg(conflicts_with_all = ["family", "seqlen", "headdim", "reps", "json", "peers"])]
    pub draw: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  fa ladder --plot ladder.svg
  fa ladder --family sm90 --headdim 64,128 --seqlen 1024,8192 --json ladder.json
  fa ladder --published
  fa ladder --profile --ncu --seqlen 4096 --json profile.json
  fa ladder --draw docs/results/ladder/sm90-h100.json --plot ladder.svg

The published ladders beside ours are other GPUs' (an A10G, a DGX Spark and a B200) and other \
kernels': their shape is compared, as a ratio to the first step, not their rates. Every step's output is \
checked before it is timed, and all steps on a shape take turns.";

fn family() -> impl TypedValueParser<Value = Family> {
    let values = [
        (
            Family::Sm80,
            "mma.sync: from a naive kernel to ldmatrix and a pipeline, and from small tiles to tuned ones",
        ),
        (Family::Sm90, "wgmma: each knob alone, beside the same kernel without the change"),
    ]
    .map(|(family, about)| PossibleValue::new(family.name()).help(about));
    PossibleValuesParser::new(values).try_map(|name| name.parse::<Family>())
}

/// Runs the command.
///
/// # Errors
/// Bad input, an unwritable target, no usable GPU.
pub(crate) fn command(args: &LadderArgs) -> anyhow::Result<Verdict> {
    if let Some(record) = &args.draw {
        return record::redraw("fa ladder", record, args.plot.as_deref(), draw::Record::draw);
    }
    if args.published {
        output::print(&published::table(&published::rows()?))?;
        return Ok(Verdict::Good);
    }
    let seqlens: Vec<usize> = args.seqlen.iter().map(|&n| n as usize).collect();
    if args.family == Family::Sm80 && !args.headdim.is_empty() {
        let message = "the sm80 ladder is that of head dim 128, as published: leave --headdim out";
        return Err(InputError::Usage(message.to_owned()).into());
    }
    let destinations = Destinations::probe(args.json.as_deref(), args.plot.as_deref(), &[])?;
    if args.profile {
        let options = profile::Options {
            family: args.family,
            arch: args.target,
            seqlens,
            head_dims: args.headdim.clone(),
            program: std::env::current_exe()?,
            ncu: args.ncu.clone(),
        };
        let report = profile::run(&options, &mut progress::steps())?;
        destinations.write(&report, || Ok(String::new()), || table::profile(&report))?;
        return Ok(Verdict::Good);
    }
    let options = Options {
        family: args.family,
        seqlens,
        head_dims: args.headdim.clone(),
        turns: Turns::of(usize::from(args.reps)),
        peers: args.peers,
    };
    let report = ladder::run(&options, &mut progress::steps())?;
    destinations.write(&report, || record::of::<draw::Record>(&report)?.draw(), || table::table(&report))?;
    Ok(if report.rows.iter().any(|row| row.wrong) { Verdict::Bad } else { Verdict::Good })
}
