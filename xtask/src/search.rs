//! `cargo xtask search`: the SM90 guide's feasible tiles for a pair of head dims, best first.

use std::fmt::{Display, Write as _};
use std::io::{self, Write as _};

use anyhow::Result;
use fa_core::Arch;
use fa_planner::guide::account::{self, Account};
use fa_planner::guide::bwd::BwdConfig;
use fa_planner::guide::fwd::FwdConfig;
use fa_planner::guide::reject::Explain;
use fa_planner::guide::search::{HEAD_DIM_GRANULE, SearchResult, Tiles, search};
use fa_planner::{HeadDims, Mode};
use serde::Serialize;

use crate::table::Table;
use crate::{BadInput, plans};

/// List the feasible configurations for a pair of head dims, best first: on sm90 those of the block size tuning guide.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo xtask search --headdim 128
  cargo xtask search --headdim 192-128 --mode bwd --explain
  cargo xtask search --headdim 128 --arch sm80
  cargo xtask search --headdim 192 --mode bwd --tile-m 64,80 --tile-n 64,96 --format json")]
pub struct Args {
    /// Head dim, or those of Q/K and of V as in 192-128; 1 to 512, planned as the next multiple of 32.
    #[arg(long, value_name = "H[-HV]")]
    headdim: HeadDims,
    /// fwd, bwd or both.
    #[arg(long, default_value = "both")]
    mode: Mode,
    /// Backward tile_m to try instead of 64,80,96,112,128 (the forward's tile_m is 64 per MMA warp group); on other
    /// architectures than sm90 only tiles with one of these.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    tile_m: Option<Vec<u32>>,
    /// tile_n to try instead of 64 to 192 (forward) and 64 to 128 (backward) in steps of 16; on other architectures than
    /// sm90 only tiles with one of these.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    tile_n: Option<Vec<u32>>,
    /// List at most N configurations of each direction [default: 10 in the table, all in JSON and RON].
    #[arg(short, long = "num-results", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    n: Option<u32>,
    /// sm80, sm86, sm89, sm90, sm100, sm103, sm120 or sm121.
    #[arg(long, default_value = "sm90")]
    arch: Arch,
    /// table, json or ron.
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
    /// Add how many candidates each limit rejected and the nearest miss of each kind; in the table also the exact account
    /// of the best.
    #[arg(long)]
    explain: bool,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Format {
    Table,
    Json,
    Ron,
}

/// Configurations per direction that the table shows unless told otherwise.
const TABLE_ROWS: u32 = 10;

pub fn run(args: &Args) -> Result<()> {
    if args.arch == Arch::Sm90 { run_guide(args) } else { run_plans(args) }
}

/// sm90: the guide's model.
fn run_guide(args: &Args) -> Result<()> {
    if args.mode == Mode::Fwd && args.tile_m.is_some() {
        eprintln!("note: --tile-m lists the backward's tile_m; the forward's is 64 per MMA warp group");
    }
    let tiles = Tiles::with_lists(args.tile_m.as_deref(), args.tile_n.as_deref());
    let result = search(args.headdim, args.mode, &tiles).map_err(|error| BadInput(error.to_string()))?;
    if args.format == Format::Table {
        return print(&table(args, &result));
    }
    eprint!("{}", nothing_found(args.headdim, &result));
    print(&serialised(args.format, &listed(args, &result))?)
}

/// Other architectures: the planner's own tiles.
fn run_plans(args: &Args) -> Result<()> {
    let (tile_m, tile_n) = (args.tile_m.as_deref(), args.tile_n.as_deref());
    let mut found = plans::search(args.headdim, args.mode, args.arch, tile_m, tile_n)
        .map_err(|error| BadInput(error.to_string()))?;
    if args.format == Format::Table {
        return print(&found.table(args.mode, args.n.unwrap_or(TABLE_ROWS) as usize, args.explain));
    }
    for (mode, nothing) in [(Mode::Fwd, found.fwd.is_empty()), (Mode::Bwd, found.bwd.is_empty())] {
        if nothing && (args.mode == mode || args.mode == Mode::Both) {
            eprint!("{}", found.table(mode, 0, true));
        }
    }
    if let Some(n) = args.n {
        found.fwd.truncate(n as usize);
        found.bwd.truncate(n as usize);
    }
    found.explain = found.explain.filter(|_| args.explain);
    print(&serialised(args.format, &found)?)
}

fn serialised(format: Format, value: &impl Serialize) -> Result<String> {
    let text = if format == Format::Json {
        serde_json::to_string_pretty(value)?
    } else {
        ron::ser::to_string_pretty(value, ron::ser::PrettyConfig::default())?
    };
    Ok(text + "\n")
}

/// The result with as much as the arguments ask for.
fn listed(args: &Args, result: &SearchResult) -> SearchResult {
    let mut listed = result.clone();
    if let Some(n) = args.n {
        listed.fwd.truncate(n as usize);
        listed.bwd.truncate(n as usize);
    }
    listed.explain = listed.explain.filter(|_| args.explain);
    listed
}

/// Writes to standard output; a reader that has seen enough (`| head`) is no error.
fn print(text: &str) -> Result<()> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

fn table(args: &Args, result: &SearchResult) -> String {
    let mut text = String::new();
    let explain = result.explain.unwrap_or_default();
    let n = args.n.unwrap_or(TABLE_ROWS) as usize;
    if let Some(explain) = explain.fwd {
        let rows = result.fwd.iter().take(n).map(fwd_row).collect();
        let table = Table { header: FWD_HEADER, rows };
        push_direction(&mut text, args, "forward", &explain, &table);
        if let Some(best) = result.fwd.first().filter(|_| args.explain) {
            push_account(&mut text, &account::fwd(args.headdim, best));
        }
    }
    if let Some(explain) = explain.bwd {
        if !text.is_empty() {
            text.push('\n');
        }
        let rows = result.bwd.iter().take(n).map(bwd_row).collect();
        let table = Table { header: BWD_HEADER, rows };
        push_direction(&mut text, args, "backward", &explain, &table);
        if let Some(best) = result.bwd.first().filter(|_| args.explain) {
            push_account(&mut text, &account::bwd(args.headdim, best));
        }
    }
    text
}

fn push_direction<S: Copy + Display, const N: usize>(
    text: &mut String,
    args: &Args,
    direction: &str,
    explain: &Explain<S>,
    table: &Table<N>,
) {
    if explain.feasible == 0 {
        text.push_str(&nothing(args.headdim, direction, explain));
        return;
    }
    let Explain { candidates, feasible, .. } = explain;
    let shown = table.rows.len();
    let which = if shown == *feasible { String::new() } else { format!(", the best {shown}") };
    let _ = writeln!(
        text,
        "sm90 {direction}, head dim {}: {feasible} of {candidates} candidates fit{which}:\n",
        headdim(args.headdim)
    );
    let _ = write!(text, "{table}");
    if args.explain {
        let _ = writeln!(text, "\nRejected, by the first limit broken:");
        push_limits(text, explain);
    }
}

/// One line per limit: how many it rejected, and which of them comes nearest.
fn push_limits<S: Copy + Display>(text: &mut String, explain: &Explain<S>) {
    for (name, limit) in explain.limits() {
        let _ = write!(text, "  {name:<13}  {:>5}", limit.rejected);
        if let Some(miss) = limit.nearest {
            let _ = write!(text, "  nearest: {} ({})", miss.reason, miss.spec);
        }
        text.push('\n');
    }
}

/// What a block of the best really takes, barriers and row statistics included.
fn push_account(text: &mut String, account: &Account) {
    let Account { smem, smem_limit, setmaxnreg, threads, occupancy } = account;
    let blocks = occupancy.blocks();
    let _ = writeln!(
        text,
        "\nThe best takes {} of {} KiB, {threads} threads, setmaxnreg {} (MMA) and {} (loads); {blocks} per SM (by SMEM \
         {}, registers {}, threads {}):\n",
        kib(smem.total),
        kib(*smem_limit),
        setmaxnreg.mma,
        setmaxnreg.producer,
        occupancy.by_smem,
        occupancy.by_registers,
        occupancy.by_threads,
    );
    let rows = smem.buffers.iter().map(|buffer| {
        let alias = buffer.alias_of.as_deref().unwrap_or("-");
        [
            buffer.name.to_string(),
            buffer.offset.to_string(),
            buffer.size.to_string(),
            buffer.align.to_string(),
            alias.to_owned(),
        ]
    });
    let header = ["buffer", "offset", "bytes", "align", "reuses"];
    let _ = write!(text, "{}", Table { header, rows: rows.collect() });
}

/// The message in place of an empty table.
fn nothing<S: Copy + Display>(dims: HeadDims, direction: &str, explain: &Explain<S>) -> String {
    let mut text = format!(
        "sm90 {direction}, head dim {}: no configuration fits; the limits rejected all {} candidates:\n",
        headdim(dims),
        explain.candidates
    );
    push_limits(&mut text, explain);
    text
}

fn nothing_found(dims: HeadDims, result: &SearchResult) -> String {
    let explain = result.explain.unwrap_or_default();
    let fwd = explain.fwd.filter(|e| e.feasible == 0).map(|e| nothing(dims, "forward", &e));
    let bwd = explain.bwd.filter(|e| e.feasible == 0).map(|e| nothing(dims, "backward", &e));
    fwd.unwrap_or_default() + &bwd.unwrap_or_default()
}

fn headdim(dims: HeadDims) -> String {
    let padded = dims.padded(HEAD_DIM_GRANULE);
    if padded == dims { dims.to_string() } else { format!("{dims} (planned as {padded})") }
}

const FWD_HEADER: [&str; 13] = [
    "wg",
    "tile_m",
    "tile_n",
    "RS",
    "overlap",
    "regs S",
    "P",
    "O",
    "total",
    "limit",
    "SMEM KiB",
    "traffic KiB",
    "traffic/elem",
];

fn fwd_row(c: &FwdConfig) -> [String; 13] {
    [
        c.num_wg.to_string(),
        c.tile_m.to_string(),
        c.tile_n.to_string(),
        flag(c.pv_is_rs),
        flag(c.overlap_wg),
        c.regs_s.to_string(),
        c.regs_p.to_string(),
        c.regs_o.to_string(),
        c.total_regs.to_string(),
        c.reg_limit.to_string(),
        kib(c.smem_bytes),
        kib(c.smem_traffic),
        format!("{:.1}", c.traffic_per_element()),
    ]
}

const BWD_HEADER: [&str; 22] = [
    "wg",
    "tile_m",
    "tile_n",
    "swap SdP",
    "dKV",
    "dQ",
    "atom SdP",
    "dKV",
    "dQ",
    "RS",
    "stages Q",
    "dO",
    "PdS",
    "regs SdP",
    "dK",
    "dV",
    "dQ",
    "total",
    "limit",
    "SMEM KiB",
    "traffic KiB",
    "traffic/elem",
];

fn bwd_row(c: &BwdConfig) -> [String; 22] {
    [
        c.num_wg.to_string(),
        c.tile_m.to_string(),
        c.tile_n.to_string(),
        flag(c.sdp_swap_ab),
        flag(c.dkv_swap_ab),
        flag(c.dq_swap_ab),
        c.atom_layout_m_sdp.to_string(),
        c.atom_layout_n_dkv.to_string(),
        c.atom_layout_m_dq.to_string(),
        flag(c.mma_dkv_is_rs),
        c.q_stage.to_string(),
        c.do_stage.to_string(),
        c.pds_stage.to_string(),
        c.regs_sdp.to_string(),
        c.regs_dk.to_string(),
        c.regs_dv.to_string(),
        c.regs_dq.to_string(),
        c.total_regs.to_string(),
        c.reg_limit.to_string(),
        kib(c.smem_bytes),
        kib(c.smem_traffic),
        format!("{:.1}", c.traffic_per_element()),
    ]
}

fn flag(on: bool) -> String {
    if on { "T" } else { "F" }.into()
}

fn kib(bytes: u32) -> String {
    format!("{:.1}", f64::from(bytes) / 1024.0)
}
