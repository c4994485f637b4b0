//! `cargo xtask search`: the feasible tiles for a pair of head dims, which `fa plan --guide` lists as well.

use std::io::{self, Write};

use anyhow::Result;
use fa_core::Arch;
use fa_planner::guide::report::Query;
use fa_planner::{HeadDims, Mode};

use crate::workspace::BadInput;

/// List the feasible configurations for a pair of head dims, best first: on sm90 those of the block size
/// tuning guide.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo xtask search --headdim 128
  cargo xtask search --headdim 192-128 --mode bwd --explain
  cargo xtask search --headdim 128 --arch sm80
  cargo xtask search --headdim 192 --mode bwd --tile-m 64,80 --tile-n 64,96 --format json")]
pub(crate) struct Args {
    /// Head dim, or those of Q/K and of V as in 192-128; 1 to 576, planned as the next multiple of 32.
    #[arg(long, value_name = "H[-HV]")]
    headdim: HeadDims,
    /// fwd, bwd or both.
    #[arg(long, default_value = "both")]
    mode: Mode,
    /// Backward tile_m to try instead of 64,80,96,112,128 (the forward's tile_m is 64 per MMA warpgroup); on
    /// other architectures than sm90 only tiles with one of these.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    tile_m: Option<Vec<u32>>,
    /// tile_n to try instead of 64 to 192 (forward) and 64 to 128 (backward) in steps of 16; on other
    /// architectures than sm90 only tiles with one of these.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    tile_n: Option<Vec<u32>>,
    /// List at most N configurations of each direction [default: 10 in the table, all in JSON and RON].
    #[arg(short, long = "num-results", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    n: Option<u32>,
    /// sm80, sm86, sm89, sm90, sm100, sm103, sm110, sm120 or sm121.
    #[arg(long, default_value = "sm90")]
    arch: Arch,
    /// table, json or ron.
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
    /// Add how many candidates each limit rejected and the nearest miss of each kind; in the table also the
    /// exact account of the best.
    #[arg(long)]
    explain: bool,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Format {
    Table,
    Json,
    Ron,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let Args { headdim: head_dims, mode, tile_m, tile_n, n, arch, format, explain } = args;
    let limit = n.map(|n| n as usize);
    let query = Query { head_dims, mode, arch, tile_m, tile_n, limit, explain };
    let report = query.run().map_err(|error| BadInput(error.to_string()))?;
    if format != Format::Table {
        eprint!("{}", report.nothing_found());
    }
    print(&match format {
        Format::Table => report.text(),
        Format::Json => serde_json::to_string_pretty(&report)? + "\n",
        Format::Ron => ron::ser::to_string_pretty(&report, ron::ser::PrettyConfig::default())? + "\n",
    })
}

/// Writes to standard output; a reader that has seen enough (`| head`) is no error.
fn print(text: &str) -> Result<()> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}
