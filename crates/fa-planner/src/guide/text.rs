//! A search of the guide's model as text: tables, limits, and the exact account of the best.

use std::fmt::{Display, Write};

use crate::head_dims::HeadDims;
use crate::table::Table;

use super::account::{self, Account};
use super::bwd::BwdConfig;
use super::fwd::FwdConfig;
use super::reject::Explain;
use super::search::{HEAD_DIM_GRANULE, SearchResult};

/// What a row of the guide's does not say, by head dims and direction: what the compiler makes of it, and
/// where the guide's prose and its rules differ. The searches follow the rules.
const NOTES: [(u32, u32, &str, &str); 3] = [
    (
        128,
        128,
        "forward",
        "128 x 192 with overlap spills 172 bytes as our kernel (NVRTC 13.0) and is refused; without overlap \
         it ran at 684 TFLOP/s on an H100, where 192 x 80 ran at 810",
    ),
    (
        192,
        192,
        "backward",
        "the guide's prose calls 64 x 96 with 3 warpgroups the only one with tile_n above 64; its rules also \
         admit 64 x 96 and 64 x 80 with 2, and rank those first",
    ),
    (
        192,
        128,
        "backward",
        "the guide's prose has tile_n 64 with 2 warpgroups at 168 KiB; its rules give it two buffers \
         of dO, 184 KiB",
    ),
];

/// A table of the best `n` of each direction, and with `explain` what the limits rejected and the best one's
/// exact account; for a direction without any, the nearest misses.
pub(super) fn table(result: &SearchResult, n: usize, explain: bool) -> String {
    let dims = dims(result);
    let mut text = String::new();
    let explained = result.explain.unwrap_or_default();
    if let Some(limits) = explained.fwd {
        let rows = result.fwd.iter().take(n).map(fwd_row).collect();
        let table = Table { header: FWD_HEADER, rows };
        push_direction(&mut text, (dims, "forward"), &limits, &table, explain);
        if let Some(best) = result.fwd.first().filter(|_| explain) {
            push_account(&mut text, &account::fwd(dims, best));
        }
    }
    if let Some(limits) = explained.bwd {
        if !text.is_empty() {
            text.push('\n');
        }
        let rows = result.bwd.iter().take(n).map(bwd_row).collect();
        let table = Table { header: BWD_HEADER, rows };
        push_direction(&mut text, (dims, "backward"), &limits, &table, explain);
        if let Some(best) = result.bwd.first().filter(|_| explain) {
            push_account(&mut text, &account::bwd(dims, best));
        }
    }
    text
}

fn push_direction<S: Copy + Display, const N: usize>(
    text: &mut String,
    (dims, direction): (HeadDims, &str),
    limits: &Explain<S>,
    table: &Table<N>,
    explain: bool,
) {
    if limits.feasible == 0 {
        text.push_str(&nothing(dims, direction, limits));
        return;
    }
    let Explain { candidates, feasible, .. } = limits;
    let shown = table.rows.len();
    let which = if shown == *feasible { String::new() } else { format!(", the best {shown}") };
    let _ = writeln!(
        text,
        "sm90 {direction}, head dim {}: {feasible} of {candidates} candidates fit{which}:\n",
        headdim(dims)
    );
    let _ = write!(text, "{table}");
    let is_own = |(hd, hdv, of, _): &&(u32, u32, &str, &str)| {
        (*hd, *hdv, *of) == (dims.head_dim, dims.head_dim_v, direction)
    };
    if let Some((.., note)) = NOTES.iter().find(is_own) {
        let _ = writeln!(text, "\nNote: {note}.");
    }
    if explain {
        let _ = writeln!(text, "\nRejected, by the first limit broken:");
        push_limits(text, limits);
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
        "\nThe best takes {} of {} KiB, {threads} threads, setmaxnreg {} (MMA) and {} (loads); {blocks} per \
         SM (by SMEM {}, registers {}, threads {}):\n",
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

/// The nearest misses of each direction in which nothing fits; empty where something does.
pub(super) fn nothing_found(result: &SearchResult) -> String {
    let dims = dims(result);
    let explain = result.explain.unwrap_or_default();
    let fwd = explain.fwd.filter(|e| e.feasible == 0).map(|e| nothing(dims, "forward", &e));
    let bwd = explain.bwd.filter(|e| e.feasible == 0).map(|e| nothing(dims, "backward", &e));
    fwd.unwrap_or_default() + &bwd.unwrap_or_default()
}

const fn dims(result: &SearchResult) -> HeadDims {
    HeadDims { head_dim: result.head_dim, head_dim_v: result.head_dim_v }
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
