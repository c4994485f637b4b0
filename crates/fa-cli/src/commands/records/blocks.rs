//! The tables of the documents, by name.

mod ladder;

use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use fa_core::Dtype;
use fa_lab::shape::pair;
use fa_lab::summary::{self, RateRow};
use serde::Deserialize;

/// The records below the folder of the results.
pub(super) struct Records {
    pub folder: PathBuf,
}

/// A record of `fa bench`, as far as tables show it.
#[derive(Deserialize)]
struct Rates {
    #[serde(skip)]
    name: String,
    command: String,
    date: String,
    rows: Vec<RateRow>,
}

/// `817 / 746 FA3 = 1.10`, `3.05 TB/s` where nothing else computes it.
fn cell(row: &RateRow) -> String {
    let unit = if row.unit == "TFLOP/s" { String::new() } else { format!(" {}", row.unit) };
    let ours = format!("{}{unit}", digits(row.rate));
    match row.best_peer() {
        Some((peer, over)) => {
            format!("{ours} / {} {} = {over:.2}", digits(row.peers[peer]), short_name(peer))
        }
        None => ours,
    }
}

/// Three significant digits.
fn digits(value: f64) -> String {
    let fraction = (2.0 - value.log10().floor()).clamp(0.0, 5.0) as usize;
    format!("{value:.fraction$}")
}

fn short_name(peer: &str) -> String {
    match peer {
        "cudnn" => "cuDNN".to_owned(),
        "flashinfer" => "FlashInfer".to_owned(),
        other => other.to_ascii_uppercase(),
    }
}

impl Records {
    /// `marks-NAME-h100.json`.
    fn rates(&self, name: &str) -> anyhow::Result<Rates> {
        let mut rates: Rates = summary::read(&self.path(name), "fa bench")?;
        rates.name = name.to_owned();
        // Of head dims 192-128 there is a later run.
        let is_remeasured =
            name.starts_with("groups-") && name.ends_with("-fwd") && name != "groups-192-128-fwd";
        rates.rows.retain(|row| row.error.is_none() && !(is_remeasured && row.head_dim == 192));
        ensure!(!rates.rows.is_empty(), "{name} has no rows");
        Ok(rates)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("marks-{name}-h100.json"))
    }

    fn all(&self, names: &[&str]) -> anyhow::Result<Vec<Rates>> {
        names.iter().map(|name| self.rates(name)).collect()
    }
}

/// What a block shows of its records.
#[derive(Clone, Copy)]
enum Form {
    /// Every row.
    Rows,
    /// Head dims and masks by length.
    Squares,
    /// Only how our rates compare.
    Means,
}

const GROUPS_FORWARD: [&str; 4] =
    ["groups-full-fwd", "groups-causal-fwd", "groups-window-fwd", "groups-192-128-fwd"];
const GROUPS_BACKWARD: [&str; 3] = ["groups-full-bwd", "groups-causal-bwd", "groups-window-bwd"];

/// The blocks that show records of `fa bench`, with these.
const OF_RATES: [(&str, Form, &[&str]); 20] = [
    ("models", Form::Rows, &["models-fwd", "models-bwd"]),
    ("held-out", Form::Rows, &["held-out-fwd", "held-out-bwd", "held-out-bwd-cudnn"]),
    ("sharded", Form::Rows, &["sharded-fwd", "sharded-bwd"]),
    ("groups-forward", Form::Means, &GROUPS_FORWARD),
    ("groups-backward", Form::Means, &GROUPS_BACKWARD),
    ("drawn", Form::Means, &["drawn-fwd", "drawn-bwd"]),
    ("deterministic", Form::Means, &["models-bwd-deterministic"]),
    ("decode", Form::Rows, &["decode"]),
    ("decode-models", Form::Rows, &["decode-models"]),
    ("step", Form::Rows, &["step"]),
    ("chunks", Form::Rows, &["chunks"]),
    ("mixed", Form::Rows, &["mixed"]),
    ("packed", Form::Rows, &["packed", "packed-bwd"]),
    ("packed-models", Form::Rows, &["packed-models-fwd", "packed-models-bwd"]),
    ("paged", Form::Rows, &["paged"]),
    ("sinks", Form::Rows, &["sinks"]),
    ("plan-kernel", Form::Rows, &["plan"]),
    ("sm90", Form::Squares, &["sm90"]),
    ("sm90-bwd", Form::Squares, &["sm90-bwd"]),
    ("sm80", Form::Means, &["sm80", "sm80-bwd"]),
];

/// The other blocks: the example of README, its overview of rates, and the ladders.
const OTHERS: [&str; 3] = ["plan", "summary", "ladder"];

/// The names of all blocks.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    OF_RATES.iter().map(|own| own.0).chain(OTHERS)
}

/// The text of a block; `None` for one that something else writes.
///
/// # Errors
/// Records that cannot be read.
pub(super) fn block(records: &Records, name: &str) -> anyhow::Result<Option<String>> {
    if let Some((_, form, names)) = OF_RATES.iter().find(|own| own.0 == name) {
        let of = records.all(names)?;
        let table = match form {
            Form::Rows => rows(&of),
            Form::Squares => squares(&of[0]),
            Form::Means => String::new(),
        };
        let parts = [runs(&of), table, means(&of)];
        let parts: Vec<&str> = parts.iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
        return Ok(Some(parts.join("\n")));
    }
    Ok(match name {
        "plan" => Some(plan()?),
        "summary" => Some(overview(records)?),
        "ladder" => Some(ladder::block(&records.folder)?),
        _ => None,
    })
}

/// When and by which commands the records were measured.
fn runs(of: &[Rates]) -> String {
    let mut text = String::new();
    for Rates { name, command, date, .. } in of {
        let mut words = command.split_whitespace();
        let mut kept = Vec::new();
        while let Some(word) = words.next() {
            if ["--json", "--plot"].contains(&word) {
                words.next();
            } else {
                kept.push(word);
            }
        }
        let _ = writeln!(
            text,
            "- [{name}](results/marks-{name}-h100.json), {}: `{}`",
            date.get(..10).unwrap_or(date),
            kept.join(" ")
        );
    }
    text
}

/// A row for each shape of the first record, with the rates of the same row in the others.
fn rows(of: &[Rates]) -> String {
    let named = of[0].rows.iter().any(|row| row.name.is_some());
    let heads: Vec<String> =
        of.iter().map(|rates| if of.len() == 1 { "rate".to_owned() } else { head(rates) }).collect();
    let first = if named { "| | shape |" } else { "| shape |" };
    let mut text =
        format!("{first} {} |\n|{}\n", heads.join(" | "), "---|".repeat(of.len() + 1 + usize::from(named)));
    for (index, row) in of[0].rows.iter().enumerate() {
        // Records of one list have their rows in one order, but rows may be missing.
        let same = |other: &&RateRow| {
            other.label() == row.label() && other.shape() == row.shape() && other.group == row.group
        };
        let cells = of.iter().map(|rates| {
            let there = rates.rows.get(index).filter(same).or_else(|| rates.rows.iter().find(same));
            there.map_or_else(String::new, cell)
        });
        let cells = cells.collect::<Vec<_>>().join(" | ");
        let name = row.name.as_ref().map_or_else(String::new, |name| format!("{name} | "));
        let _ = writeln!(text, "| {name}{} | {cells} |", row.shape());
    }
    text
}

/// What a column with a record's rates is called.
fn head(rates: &Rates) -> String {
    let pass = pass_of(&rates.rows[0]);
    if rates.name.ends_with("-cudnn") { format!("{pass}, another run") } else { pass.to_owned() }
}

fn pass_of(row: &RateRow) -> &'static str {
    if row.kind == "bwd" { "backward" } else { "forward" }
}

/// Ratios over some rows.
struct Spread<'a> {
    rows: usize,
    mean: f64,
    lowest: (f64, &'a RateRow),
    below: usize,
}

impl<'a> Spread<'a> {
    /// Against the best peer, or one of them.
    fn of(rows: impl Iterator<Item = &'a RateRow>, peer: Option<&str>) -> Option<Spread<'a>> {
        let ratio = |row: &'a RateRow| match peer {
            None => Some((row.best_peer()?.1, row)),
            Some(peer) => Some((row.over(*row.peers.get(peer)?), row)),
        };
        let ratios: Vec<(f64, &RateRow)> = rows.filter_map(ratio).collect();
        let lowest = *ratios.iter().min_by(|a, b| a.0.total_cmp(&b.0))?;
        let logs: f64 = ratios.iter().map(|own| own.0.ln()).sum();
        let below = ratios.iter().filter(|own| own.0 < 1.0).count();
        Some(Spread { rows: ratios.len(), mean: (logs / ratios.len() as f64).exp(), lowest, below })
    }
}

/// Ratios to the best peer and to each, by record and group; empty where nothing else was measured.
fn means(of: &[Rates]) -> String {
    let mut text = String::new();
    for rates in of {
        let mut groups: Vec<&str> = Vec::new();
        for row in &rates.rows {
            if !groups.contains(&row.group.as_str()) {
                groups.push(&row.group);
            }
        }
        let mut peers: Vec<&str> =
            rates.rows.iter().flat_map(|row| row.peers.keys().map(String::as_str)).collect();
        peers.sort_unstable();
        peers.dedup();
        let all = (peers.len() > 1).then_some(None);
        let against: Vec<Option<&str>> = all.into_iter().chain(peers.iter().copied().map(Some)).collect();
        for group in groups {
            for &peer in &against {
                let own = rates.rows.iter().filter(|row| row.group == group);
                let Some(Spread { rows: count, mean, lowest: (lowest, row), below }) = Spread::of(own, peer)
                else {
                    continue;
                };
                // A single row says it itself.
                if count == 1 {
                    continue;
                }
                let _ = writeln!(
                    text,
                    "| {}: {group} | {} | {count} | {mean:.2} | {lowest:.3} | {} | {below} |",
                    head(rates),
                    peer.map_or_else(|| "best peer".to_owned(), short_name),
                    row.label()
                );
            }
        }
    }
    let head = "| | over | rows | geometric mean | lowest | of | below 1 |\n|---|---|---|---|---|---|---|\n";
    if text.is_empty() { text } else { format!("{head}{text}") }
}

/// Square shapes in bf16: a row for each head dim and mask, a column for each length.
fn squares(rates: &Rates) -> String {
    let square = |row: &&RateRow| {
        row.seqlen_q == row.seqlen_k && row.dtype == Dtype::Bf16 && row.group.starts_with("bf16")
    };
    let own: Vec<&RateRow> = rates.rows.iter().filter(square).collect();
    let mut lengths: Vec<usize> = own.iter().map(|row| row.seqlen_k).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let kind = |row: &RateRow| (row.head_dim, row.head_dim_v, row.mask.clone());
    let mut kinds: Vec<_> = own.iter().map(|row| kind(row)).collect();
    kinds.sort_by(|a, b| (a.0, a.1).cmp(&(b.0, b.1)).then(b.2.cmp(&a.2)));
    kinds.dedup();
    let heads: Vec<String> = lengths.iter().map(|length| format!("N = {length}")).collect();
    let mut text =
        format!("| head dim | mask | {} |\n|{}\n", heads.join(" | "), "---|".repeat(lengths.len() + 2));
    for own_kind in kinds {
        let cell = |&length: &usize| {
            let row = own.iter().find(|row| row.seqlen_k == length && kind(row) == own_kind);
            row.map_or_else(String::new, |row| cell(row))
        };
        let cells: Vec<String> = lengths.iter().map(cell).collect();
        let (head_dim, head_dim_v, mask) = own_kind;
        let _ = writeln!(text, "| {} | {mask} | {} |", pair(head_dim, head_dim_v, '-'), cells.join(" | "));
    }
    text
}

/// README's overview: a line for each list.
fn overview(records: &Records) -> anyhow::Result<String> {
    /// What is shown, records of the forward, records of the backward.
    type Line = (&'static str, &'static [&'static str], &'static [&'static str]);
    const LINES: [Line; 10] = [
        ("layers of released models", &["models-fwd"], &["models-bwd"]),
        ("the same, deterministic", &[], &["models-bwd-deterministic"]),
        ("layers of models to which nothing was tuned", &["held-out-fwd"], &["held-out-bwd"]),
        ("groups of heads by head dims, masks and lengths", &GROUPS_FORWARD, &GROUPS_BACKWARD),
        ("shapes drawn at random", &["drawn-fwd"], &["drawn-bwd"]),
        ("square shapes", &["sm90"], &["sm90-bwd"]),
        ("layers on one of several GPUs", &["sharded-fwd"], &["sharded-bwd"]),
        ("packed batches of models", &["packed-models-fwd"], &["packed-models-bwd"]),
        ("decoding models", &["decode-models"], &[]),
        ("chunks of prompts", &["chunks"], &[]),
    ];
    let mut text =
        "| | forward, over the best peer | backward, over the best peer |\n|---|---|---|\n".to_owned();
    for (what, forward, backward) in LINES {
        let mut cells = Vec::new();
        for names in [forward, backward] {
            let of = records.all(names)?;
            let rows = of.iter().flat_map(|rates| &rates.rows).filter(|row| !row.group.starts_with("f16"));
            cells.push(Spread::of(rows, None).map_or_else(String::new, |own| {
                format!("{:.2} (lowest {:.2}, {} rows)", own.mean, own.lowest.0, own.rows)
            }));
        }
        let _ = writeln!(text, "| {what} | {} | {} |", cells[0], cells[1]);
    }
    Ok(text)
}

/// The example of README, as this program prints it up to the prediction.
fn plan() -> anyhow::Result<String> {
    const EXAMPLE: &str = "plan --headdim 128 --seqlen 8192 --heads 16 --batch 2 --causal -n 3";
    let program = std::env::current_exe().context("cannot find this program to start it again")?;
    let done = std::process::Command::new(program).args(EXAMPLE.split(' ')).output()?;
    ensure!(done.status.success(), "fa {EXAMPLE}: {}", String::from_utf8_lossy(&done.stderr));
    let printed = String::from_utf8(done.stdout)?;
    let end = printed.find("\nwork ").context("the plan has no line `work`")?;
    let rejected = printed
        .lines()
        .filter_map(|line| line.strip_prefix("rejected ")?.trim().split(' ').next()?.parse::<usize>().ok());
    let rest = format!(
        "and then the best kernel's registers and shared memory, and why the other {} candidates do not fit.",
        rejected.sum::<usize>()
    );
    Ok(format!("```text\n{}\n```\n\n{rest}", printed[..end].trim_end()))
}
