//! What was climbed, as JSON, as a table and as a drawing.

use std::collections::BTreeMap;

use fa_core::{Arch, Family, KernelSpec};
use serde::Serialize;

use crate::bench_gpu::KernelRecord;
use crate::contest::Turns;
use crate::draw::bars::{Group, Ratios};
use crate::draw::chart::{Chart, Series};
use crate::draw::plot::{self, Panel};
use crate::record::Provenance;
use crate::shape::Shape;
use crate::term::output;

use super::Ladder;

/// A run.
#[derive(Debug, Serialize)]
pub struct Report {
    #[serde(flatten)]
    provenance: Provenance,
    #[serde(skip)]
    family: Family,
    /// Launches of each kernel that counted.
    reps: usize,
    kernels: Vec<KernelRecord>,
    pub rows: Vec<Row>,
}

/// One step on one shape.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    ladder: String,
    step: String,
    change: &'static str,
    #[serde(flatten)]
    shape: Shape,
    spec: Option<String>,
    ms_median: Option<f64>,
    tflops: Option<f64>,
    /// Our rate over that of the first step.
    ratio: Option<f64>,
    /// The same of the published ladder.
    published_ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Whether a kernel of this step gave a wrong result.
    pub wrong: bool,
}

/// The rows of a ladder; `timed` are (step, kernel, milliseconds), of a step with several the fastest counts.
pub fn rows(
    ladder: &Ladder,
    timed: &[(usize, &KernelSpec, f64)],
    errors: &[Option<String>],
    wrong: &[bool],
) -> Vec<Row> {
    let p = &ladder.problem;
    let fastest = |step: usize| {
        let own = timed.iter().filter(|(index, ..)| *index == step);
        own.min_by(|a, b| a.2.total_cmp(&b.2)).map(|(_, spec, ms)| (spec.to_string(), *ms))
    };
    let first = fastest(0).map(|(_, ms)| ms);
    let published_first = ladder.published.first().copied().flatten();
    let row = |(index, step): (usize, &super::Step)| {
        let found = fastest(index);
        let ms = found.as_ref().map(|(_, ms)| *ms);
        let published = ladder.published.get(index).copied().flatten();
        Row {
            ladder: ladder.name.clone(),
            step: step.name.clone(),
            change: step.change,
            shape: Shape::from(p),
            spec: found.map(|(spec, _)| spec),
            ms_median: ms,
            tflops: ms.map(|ms| p.flops_forward() / (ms * 1e9)),
            ratio: first.zip(ms).map(|(first, ms)| first / ms),
            published_ratio: published_first.zip(published).map(|(first, rate)| rate / first),
            error: errors[index].clone().filter(|_| ms.is_none() || wrong[index]),
            wrong: wrong[index],
        }
    };
    ladder.steps.iter().enumerate().map(row).collect()
}

impl Row {
    fn name(&self) -> String {
        let Shape { batch, mask, dtype, .. } = &self.shape;
        let (heads, seqlens, dims) = (self.shape.heads(), self.shape.seqlens(), self.shape.head_dims());
        format!("B {batch} H {heads} N {seqlens} hd {dims} {mask} {dtype}")
    }
}

impl Report {
    /// An empty one.
    pub fn new(provenance: Provenance, family: Family, turns: Turns) -> Report {
        let reps = turns.rounds * turns.reps;
        Report { provenance, family, reps, kernels: Vec::new(), rows: Vec::new() }
    }

    /// Notes a kernel that was run.
    ///
    /// # Errors
    /// A spec that is none.
    pub fn add_kernel(&mut self, spec: &KernelSpec, arch: Arch) -> anyhow::Result<()> {
        KernelRecord::add(&mut self.kernels, spec, arch)
    }

    /// Rows in runs of one ladder on one shape.
    fn climbs(&self) -> Vec<&[Row]> {
        self.rows.chunk_by(|a, b| a.ladder == b.ladder && a.shape == b.shape).collect()
    }

    /// For a terminal.
    pub fn table(&self) -> String {
        let device = &self.provenance.device;
        let driver = device.driver.as_deref().unwrap_or("unknown");
        let mut text = format!("{}, driver {driver}; medians of {} launches\n", device.gpu, self.reps);
        for climb in self.climbs() {
            text += &format!("\n{}: {}\n", climb[0].ladder, climb[0].name());
            let published = climb.iter().any(|row| row.published_ratio.is_some());
            let mut header = vec!["step", "kernel", "ms", "TFLOP/s", "to first"];
            header.extend(published.then_some("published"));
            let mut table = output::table(&header);
            for row in climb {
                let number = |value: Option<f64>, digits: usize| {
                    value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
                };
                let kernel = row.spec.clone().or_else(|| row.error.clone()).unwrap_or_default();
                let mut cells = vec![
                    row.step.clone(),
                    kernel,
                    number(row.ms_median, 4),
                    number(row.tflops, 0),
                    number(row.ratio, 3),
                ];
                cells.extend(published.then(|| number(row.published_ratio, 3)));
                table.add_row(cells);
            }
            text += &output::table_text(&table);
            for row in climb.iter().filter(|row| row.wrong) {
                text += &format!("{}: {}\n", row.step, row.error.as_deref().unwrap_or("wrong"));
            }
        }
        text
    }

    /// Steps as ratios to the first, beside what was published; where there are several lengths also rates over them.
    ///
    /// # Errors
    /// What the drawing library reports.
    pub fn draw(&self) -> anyhow::Result<String> {
        let mut panels: Vec<Box<dyn Panel>> = Vec::new();
        match self.family {
            Family::Sm80 => {
                let of = |name: &str| -> Vec<Vec<Row>> {
                    self.climbs().into_iter().filter(|c| c[0].ladder == name).map(<[Row]>::to_vec).collect()
                };
                let ratios = |title: String, published_on: &str, climbs: &[Vec<Row>]| Ratios {
                    title,
                    x_label: "rate over the first step's".to_owned(),
                    series: vec!["this project".to_owned(), format!("published ({published_on})")],
                    groups: groups(climbs),
                };
                let (memory, tiles) = (of("memory"), of("tiles"));
                if let Some(climb) = memory.first() {
                    let title = format!("From naive to pipelined, {}", climb[0].name());
                    panels.push(Box::new(ratios(title, "A10G", &memory)));
                }
                if !tiles.is_empty() {
                    panels.push(Box::new(Chart {
                        title: "From small tiles to tuned ones, B 4 H 32 hd 128 causal f16".to_owned(),
                        x_label: "keys per sequence",
                        y_label: "TFLOP/s",
                        ceiling: None,
                        series: lines(&tiles),
                    }));
                    let title = "The same as ratio to small tiles, geometric mean over lengths".to_owned();
                    panels.push(Box::new(ratios(title, "B200", &tiles)));
                }
            }
            Family::Sm90 => {
                for climb in self.climbs() {
                    let rate = climb[0].tflops.map_or("-".to_owned(), |rate| format!("{rate:.0}"));
                    panels.push(Box::new(Ratios {
                        title: format!("One knob turned, {}", climb[0].name()),
                        x_label: format!("rate over the base's {rate} TFLOP/s"),
                        series: vec!["this project".to_owned()],
                        groups: groups(&[climb.to_vec()]),
                    }));
                }
            }
        }
        plot::sheet(&format!("Optimisation steps on {}", self.provenance.device.gpu), 1, &panels)
    }
}

fn geometric_mean(values: impl Iterator<Item = Option<f64>>) -> Option<f64> {
    let logs: Vec<f64> = values.flatten().map(f64::ln).collect();
    (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp())
}

/// Bars of every step: our ratio, and the published one where there is any.
fn groups(climbs: &[Vec<Row>]) -> Vec<Group> {
    let published = climbs.iter().flatten().any(|row| row.published_ratio.is_some());
    let mut groups = Vec::new();
    for index in 0..climbs.iter().map(Vec::len).max().unwrap_or(0) {
        let rows = || climbs.iter().filter_map(|climb| climb.get(index));
        let Some(first) = rows().next() else { continue };
        let mut values = vec![geometric_mean(rows().map(|row| row.ratio))];
        if published {
            values.push(geometric_mean(rows().map(|row| row.published_ratio)));
        }
        // A step that does not exist on this shape has no bar.
        if values.iter().any(Option::is_some) {
            groups.push(Group { label: first.step.clone(), values });
        }
    }
    groups
}

fn lines(climbs: &[Vec<Row>]) -> Vec<Series> {
    let mut by_step: BTreeMap<usize, Series> = BTreeMap::new();
    for climb in climbs {
        for (index, row) in climb.iter().enumerate() {
            let Some(rate) = row.tflops else { continue };
            let line = by_step.entry(index).or_insert_with(|| Series {
                label: row.step.clone(),
                points: Vec::new(),
                color: index,
                dashed: false,
            });
            line.points.push((row.shape.seqlen_k as f64, rate));
        }
    }
    let mut lines: Vec<Series> = by_step.into_values().collect();
    lines.iter_mut().for_each(|line| line.points.sort_by(|a, b| a.0.total_cmp(&b.0)));
    lines
}
