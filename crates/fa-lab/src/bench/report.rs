//! What a run found, as JSON and as a table.

use std::collections::BTreeMap;

use fa_core::{Arch, KernelSpec, Pass};
use serde::Serialize;

use crate::contest::Times;
use crate::peers::{Ceilings, Hello, Peers};
use crate::record::Provenance;
use crate::sample_rows::Judged;
use crate::shape::Shape;
use crate::term::output;

use super::{Wanted, fingerprint};

/// A run.
#[derive(Debug, Serialize)]
pub struct Report {
    #[serde(flatten)]
    pub provenance: Provenance,
    /// Launches of each kernel that counted.
    pub reps: usize,
    /// Turns that they came in.
    pub rounds: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peers: Option<PeersRecord>,
    pub kernels: Vec<KernelRecord>,
    pub rows: Vec<Row>,
    pub summary: Vec<Summary>,
}

/// Who ran beside ours.
#[derive(Debug, Serialize)]
pub struct PeersRecord {
    pub torch: Option<String>,
    pub names: Vec<String>,
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
    pub fn of(peers: &mut Peers) -> anyhow::Result<PeersRecord> {
        let ceilings = peers.ceilings()?;
        let Hello { torch, peers: names, versions, errors, .. } = peers.hello.clone();
        Ok(PeersRecord { torch, names, versions, errors, ceilings })
    }
}

/// A kernel of ours.
#[derive(Debug, Serialize)]
pub struct KernelRecord {
    pub name: String,
    pub spec: KernelSpec,
    /// SHA-256 over the translation unit and every header that it reaches.
    pub sources: String,
}

impl KernelRecord {
    /// Adds the kernel of `spec` to `kernels` unless it is there.
    ///
    /// # Errors
    /// A spec that is none, or not for `arch`.
    pub fn add(kernels: &mut Vec<KernelRecord>, spec: &KernelSpec, arch: Arch) -> anyhow::Result<()> {
        if kernels.iter().all(|known| known.spec != *spec) {
            let sources = fingerprint(spec, arch)?;
            kernels.push(KernelRecord { name: spec.to_string(), spec: spec.clone(), sources });
        }
        Ok(())
    }
}

/// One kernel on one shape.
#[derive(Debug, Serialize)]
pub struct Row {
    /// `fwd` or `bwd`.
    pub kind: &'static str,
    pub group: &'static str,
    #[serde(flatten)]
    pub shape: Shape,
    /// The kernel's name.
    pub spec: String,
    pub ms_median: f64,
    pub ms_min: f64,
    pub tflops: f64,
    /// TFLOP/s of the others in this run.
    pub peers: BTreeMap<String, f64>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub peer_errors: BTreeMap<String, String>,
    /// TFLOP/s that others were measured at elsewhere.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub recorded: BTreeMap<String, f64>,
    /// Our rate over that of the best peer of this run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub judged: Option<Judged>,
    /// Why nothing was timed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Ratios over the rows of a group.
#[derive(Debug, Serialize)]
pub struct Summary {
    pub group: String,
    /// `best peer`, or the one that the ratio is to.
    pub against: String,
    pub rows: usize,
    pub geometric_mean: f64,
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
            group: wanted.group,
            shape: Shape::from(problem),
            spec: spec.to_owned(),
            ms_median: 0.0,
            ms_min: 0.0,
            tflops: 0.0,
            peers: BTreeMap::new(),
            peer_errors: BTreeMap::new(),
            recorded: wanted.recorded.clone(),
            ratio: None,
            judged: None,
            error: None,
        }
    }

    /// A row without times.
    pub fn failed(wanted: &Wanted, spec: &str, pass: Pass, error: String) -> Row {
        Row { error: Some(error), ..Row::empty(wanted, spec, pass) }
    }

    /// A row of times; rates of peers in TFLOP/s.
    pub fn new(
        wanted: &Wanted,
        spec: &KernelSpec,
        judged: Judged,
        times: &Times,
        peers: BTreeMap<String, f64>,
        peer_errors: BTreeMap<String, String>,
    ) -> Row {
        let pass = spec.kernel.pass();
        let tflops = times.tflops(&wanted.problem, pass);
        let best = peers.values().copied().fold(0.0, f64::max);
        Row {
            ms_median: times.median(),
            ms_min: times.ms.first().copied().unwrap_or_default(),
            tflops,
            ratio: (best > 0.0).then(|| tflops / best),
            peers,
            peer_errors,
            judged: Some(judged),
            ..Row::empty(wanted, &spec.to_string(), pass)
        }
    }

    fn name(&self) -> String {
        let Shape { mask, dtype, .. } = &self.shape;
        format!("hd {} N {} {mask} {dtype}", self.shape.head_dims(), self.shape.seqlens())
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
            let to_peer = |row: &Row| row.peers.get(&name).map(|rate| row.tflops / rate);
            summary.extend(groups.iter().filter_map(|group| self.summarise(group, &name, &to_peer)));
        }
        let cutile = |row: &Row| row.recorded.get("cutile").map(|rate| row.tflops / rate);
        summary.extend(groups.iter().filter_map(|group| self.summarise(group, "cutile, recorded", &cutile)));
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
            lowest_row: lowest_row.name(),
            below_one: ratios.iter().filter(|(ratio, _)| *ratio < 1.0).count(),
        })
    }

    /// For people: the rows, then the summary.
    pub fn table(&self) -> String {
        let names = self.peer_names();
        let mut header = vec!["hd", "heads", "batch", "N", "mask", "dtype", "kernel", "ms", "TFLOP/s"];
        header.extend(names.iter().map(String::as_str));
        let with_ratio = !names.is_empty();
        let with_recorded = self.rows.iter().any(|row| !row.recorded.is_empty());
        header.extend(with_ratio.then_some("ratio"));
        header.extend(with_recorded.then_some("recorded"));
        let mut table = output::table(&header);
        for row in &self.rows {
            let mut cells = vec![
                row.shape.head_dims(),
                row.shape.heads(),
                row.shape.batch.to_string(),
                row.shape.seqlens(),
                row.shape.mask.clone(),
                row.shape.dtype.to_string(),
                row.spec.clone(),
            ];
            match &row.error {
                Some(error) => cells.push(error.clone()),
                None => {
                    cells.extend([format!("{:.4}", row.ms_median), format!("{:.0}", row.tflops)]);
                    let rate = |name| row.peers.get(name).map_or("-".to_owned(), |rate| format!("{rate:.0}"));
                    cells.extend(names.iter().map(rate));
                    let ratio = row.ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.3}"));
                    cells.extend(with_ratio.then_some(ratio));
                    let recorded: Vec<String> =
                        row.recorded.iter().map(|(name, rate)| format!("{name} {rate:.0}")).collect();
                    cells.extend(with_recorded.then(|| recorded.join(", ")));
                }
            }
            table.add_row(cells);
        }
        let Provenance { device, compiler, commit, .. } = &self.provenance;
        let driver = device.driver.as_deref().unwrap_or("unknown");
        let mut text = format!(
            "{}, driver {driver}, CUDA {}, {compiler}, commit {commit}; medians of {} launches\n{}",
            device.gpu,
            device.cuda,
            self.reps,
            output::table_text(&table)
        );
        if let Some(PeersRecord { versions, errors, ceilings, .. }) = &self.peers {
            let versions: Vec<String> =
                versions.iter().map(|(name, version)| format!("{name}: {version}")).collect();
            let Ceilings { matmul_tflops, copy_gb_per_s } = ceilings;
            text += &format!(
                "{}; in this run a bf16 product of 8192^3 takes {matmul_tflops:.0} TFLOP/s, a copy {copy_gb_per_s:.0} GB/s\n",
                versions.join(", ")
            );
            for (name, why) in errors {
                text += &format!("no {name}: {why}\n");
            }
        }
        for s in &self.summary {
            text += &format!(
                "{}, over {}: {} rows, geometric mean {:.3}, lowest {:.3} ({}), {} below 1\n",
                s.group, s.against, s.rows, s.geometric_mean, s.lowest, s.lowest_row, s.below_one
            );
        }
        text
    }
}
