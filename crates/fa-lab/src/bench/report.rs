//! What a benchmark run found.

use std::collections::BTreeMap;

use fa_core::{KernelSpec, Pass};
use serde::Serialize;

use crate::error::Result;
use crate::judge::sample_rows::Judged;
use crate::marks::{Unit, Wanted};
use crate::peers::{Ceilings, Hello, Peers};
use crate::record::{KernelRecord, Provenance};
use crate::runner::Times;
use crate::shape::Shape;

/// A run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The machine, the program and the compiler.
    #[serde(flatten)]
    pub provenance: Provenance,
    /// Launches of each kernel that counted.
    pub reps: usize,
    /// Rounds in which they were launched.
    pub rounds: usize,
    /// The other libraries, where they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peers: Option<PeersRecord>,
    /// The kernels that ran.
    pub kernels: Vec<KernelRecord>,
    /// What was measured.
    pub rows: Vec<Row>,
    /// Shapes without a row, where the run was stopped.
    #[serde(skip_serializing_if = "is_zero")]
    pub missing: usize,
    /// Ratios by group.
    pub summary: Vec<Summary>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes fields by reference")]
const fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// The other libraries of the run.
#[derive(Debug, Serialize)]
pub struct PeersRecord {
    /// torch's version.
    pub torch: Option<String>,
    /// Those that could be loaded.
    pub names: Vec<String>,
    /// Versions, by name.
    pub versions: BTreeMap<String, String>,
    /// Why others did not.
    pub errors: BTreeMap<String, String>,
    /// Measured before the rows.
    pub ceilings: Ceilings,
}

impl PeersRecord {
    /// Asks the helper.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn of(peers: &mut Peers) -> Result<PeersRecord> {
        let ceilings = peers.ceilings()?;
        let Hello { torch, peers: names, versions, errors, .. } = peers.hello.clone();
        Ok(PeersRecord { torch, names, versions, errors, ceilings })
    }
}

/// One kernel on one shape.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `fwd` or `bwd`.
    pub kind: &'static str,
    /// The model that the shape is of, where it is one's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'static str>,
    /// What the row is summed up by.
    pub group: &'static str,
    /// The problem's shape.
    #[serde(flatten)]
    pub shape: Shape,
    /// The kernel's name.
    pub spec: String,
    /// Median milliseconds of a launch.
    pub ms_median: f64,
    /// Milliseconds of the fastest launch.
    pub ms_min: f64,
    /// TFLOP/s of visible pairs at the median.
    pub tflops: f64,
    /// Unit of `rate` and `peers`, by what bounds the shape.
    pub unit: Unit,
    /// The rate at the median, in the row's unit.
    pub rate: f64,
    /// Calls in a CUDA graph, whose replays were timed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub graph: Option<usize>,
    /// Rates of the others in this run, in the row's unit.
    pub peers: BTreeMap<String, f64>,
    /// Why the other peers did not run.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub peer_errors: BTreeMap<String, String>,
    /// Our rate over that of the best peer of this run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// How far the output is from the oracle's, where it was compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub judged: Option<Judged>,
    /// Why nothing was timed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Ratios over the rows of a group.
#[derive(Debug, Serialize)]
pub struct Summary {
    /// The rows' group.
    pub group: String,
    /// `best peer`, or the one that the ratio is to.
    pub against: String,
    /// Rows with a ratio.
    pub rows: usize,
    /// Their geometric mean.
    pub geometric_mean: f64,
    /// The lowest of them.
    pub lowest: f64,
    /// The row of the lowest ratio.
    pub lowest_row: String,
    /// Rows below 1.
    pub below_one: usize,
}

impl Row {
    fn empty(wanted: &Wanted, spec: &str, pass: Pass) -> Row {
        let problem = &wanted.problem;
        Row {
            kind: pass.short_name(),
            name: wanted.name,
            group: wanted.group,
            shape: Shape::from(problem),
            spec: spec.to_owned(),
            ms_median: 0.0,
            ms_min: 0.0,
            tflops: 0.0,
            unit: wanted.unit,
            rate: 0.0,
            graph: (wanted.graph > 0).then_some(wanted.graph),
            peers: BTreeMap::new(),
            peer_errors: BTreeMap::new(),
            ratio: None,
            judged: None,
            error: None,
        }
    }

    /// A row without times.
    pub fn failed(wanted: &Wanted, spec: &str, pass: Pass, error: String) -> Row {
        Row { error: Some(error), ..Row::empty(wanted, spec, pass) }
    }

    /// A row of times; rates of peers in the shape's unit.
    pub fn new(
        wanted: &Wanted,
        spec: &KernelSpec,
        judged: Judged,
        times: &Times,
        peers: BTreeMap<String, f64>,
        peer_errors: BTreeMap<String, String>,
    ) -> Row {
        let pass = spec.kernel.pass();
        let unit = wanted.unit;
        let rate = wanted.rate(times.median(), pass);
        let best = peers.values().copied().reduce(|a, b| unit.better(a, b));
        Row {
            ms_median: times.median(),
            ms_min: times.ms.first().copied().unwrap_or_default(),
            tflops: times.tflops(wanted, pass),
            rate,
            ratio: best.map(|best| unit.ratio(rate, best)),
            peers,
            peer_errors,
            judged: Some(judged),
            ..Row::empty(wanted, &spec.to_string(), pass)
        }
    }

    fn label(&self) -> String {
        if let Some(name) = self.name {
            return name.to_owned();
        }
        let Shape { mask, dtype, .. } = &self.shape;
        let grouped = self.shape.heads_q != self.shape.heads_kv;
        let heads = if grouped { format!(" heads {}", self.shape.heads()) } else { String::new() };
        format!("hd {}{heads} N {} {mask} {dtype}", self.shape.head_dims(), self.shape.seqlens())
    }
}

impl Report {
    /// Names of all peers in the rows.
    pub fn peer_names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.rows.iter().flat_map(|row| row.peers.keys().cloned()).collect();
        names.sort();
        names.dedup();
        names
    }

    /// Fills the summary from the rows.
    pub fn sum_up(&mut self) {
        let mut groups: Vec<&str> = Vec::new();
        self.rows.iter().for_each(|row| {
            if !groups.contains(&row.group) {
                groups.push(row.group);
            }
        });
        let best = |row: &Row| row.ratio;
        let mut summary: Vec<Summary> =
            groups.iter().filter_map(|group| self.summarise(group, "best peer", &best)).collect();
        for name in self.peer_names() {
            let to_peer = |row: &Row| row.peers.get(&name).map(|&rate| row.unit.ratio(row.rate, rate));
            summary.extend(groups.iter().filter_map(|group| self.summarise(group, &name, &to_peer)));
        }
        self.summary = summary;
    }

    fn summarise(&self, group: &str, against: &str, ratio: &dyn Fn(&Row) -> Option<f64>) -> Option<Summary> {
        let timed = self.rows.iter().filter(|row| row.group == group && row.error.is_none());
        let ratios: Vec<(f64, &Row)> = timed.filter_map(|row| Some((ratio(row)?, row))).collect();
        let (lowest, lowest_row) = ratios.iter().min_by(|a, b| a.0.total_cmp(&b.0))?;
        let logs: f64 = ratios.iter().map(|(ratio, _)| ratio.ln()).sum();
        Some(Summary {
            group: group.to_owned(),
            against: against.to_owned(),
            rows: ratios.len(),
            geometric_mean: (logs / ratios.len() as f64).exp(),
            lowest: *lowest,
            lowest_row: lowest_row.label(),
            below_one: ratios.iter().filter(|(ratio, _)| *ratio < 1.0).count(),
        })
    }
}
