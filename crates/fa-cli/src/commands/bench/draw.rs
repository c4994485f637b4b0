//! The plot: one panel per head dim, mask and type, our rate and the others' over sequence length.

use std::collections::BTreeMap;
use std::path::Path;

use fa_lab::bench::report::Report;
use fa_lab::read_text;
use fa_lab::shape::pair;
use serde::Deserialize;

use crate::draw::chart::{Chart, Series};
use crate::draw::plot::{self, Panel};
use crate::term::failure::InputError;

/// Panels side by side.
const COLUMNS: usize = 2;

/// A record as `--json` writes it, as far as it is drawn.
#[derive(Deserialize)]
pub(crate) struct Record {
    /// `None` in records of the CPU.
    gpu: Option<String>,
    machine: Option<Machine>,
    reps: Option<usize>,
    rows: Vec<Row>,
}

#[derive(Deserialize)]
struct Machine {
    cpu: String,
}

#[derive(Deserialize)]
struct Row {
    kind: String,
    group: Option<String>,
    seqlen_k: usize,
    head_dim: usize,
    head_dim_v: usize,
    mask: String,
    dtype: String,
    spec: String,
    tflops: f64,
    /// Of records before there were units, TFLOP/s.
    rate: Option<f64>,
    unit: Option<String>,
    #[serde(default)]
    peers: BTreeMap<String, f64>,
    #[serde(default)]
    recorded: BTreeMap<String, f64>,
    error: Option<String>,
}

impl Row {
    fn rate(&self) -> f64 {
        self.rate.unwrap_or(self.tflops)
    }

    fn title(&self) -> String {
        let pass = if self.kind == "bwd" { "Backward" } else { "Forward" };
        // The groups of the marks name their type.
        let shapes = self.group.as_ref().filter(|group| *group != "all").unwrap_or(&self.dtype);
        let head_dims = pair(self.head_dim, self.head_dim_v, '-');
        format!("{pass}, head dim {head_dims}, {}, {shapes}", self.mask)
    }
}

impl Record {
    /// Reads a record.
    ///
    /// # Errors
    /// [`InputError`] for a file that is not a record.
    pub(crate) fn read(path: &Path) -> anyhow::Result<Record> {
        let none = |e| InputError::Usage(format!("{} is no record of fa bench: {e}", path.display()));
        Ok(serde_json::from_str(&read_text(path)?).map_err(none)?)
    }

    /// What a run has just found, as its record will have it.
    ///
    /// # Errors
    /// None that a report can cause.
    pub(crate) fn of(report: &Report) -> anyhow::Result<Record> {
        Ok(serde_json::from_value(serde_json::to_value(report)?)?)
    }

    /// Draws the record as an SVG document: one legend, one scale for the panels of a row.
    ///
    /// # Errors
    /// What the drawing library reports.
    pub(crate) fn draw(&self) -> anyhow::Result<String> {
        let rows: Vec<&Row> = self.rows.iter().filter(|row| row.error.is_none()).collect();
        let mut titles: Vec<String> = Vec::new();
        for row in &rows {
            if !titles.contains(&row.title()) {
                titles.push(row.title());
            }
        }
        let mut colors = Colors::default();
        let mut charts: Vec<Chart> = Vec::new();
        for title in titles {
            let own: Vec<&Row> = rows.iter().copied().filter(|row| row.title() == title).collect();
            let unit = own.first().and_then(|row| row.unit.as_deref());
            let y_label = if unit == Some("TB/s") { "TB/s" } else { "TFLOP/s" };
            let series = lines(&own, &mut colors);
            let x_label = "keys per sequence";
            charts.push(Chart { title, x_label, y_label, ceiling: None, series, shared: None });
        }
        for row in charts.chunks_mut(COLUMNS) {
            let mut tops: BTreeMap<&str, f64> = BTreeMap::new();
            for chart in row.iter() {
                let top = tops.entry(chart.y_label).or_insert(0.0);
                *top = top.max(chart.top());
            }
            for chart in row {
                chart.shared = Some(tops[chart.y_label]);
            }
        }
        let machine = self.gpu.as_ref().or(self.machine.as_ref().map(|machine| &machine.cpu));
        let medians = self.reps.map_or("medians".to_owned(), |reps| format!("medians of {reps} launches"));
        let heading = format!("{}, {medians}", machine.map_or("a machine", |name| name));
        let panels: Vec<Box<dyn Panel>> =
            charts.into_iter().map(|chart| Box::new(chart) as Box<dyn Panel>).collect();
        plot::sheet_with_legend(&heading, &colors.legend(), COLUMNS, &panels)
    }
}

/// Ours, and the peers that have a colour of their own in every plot.
const KNOWN: [(&str, usize); 7] =
    [(OURS, 0), ("cudnn", 1), ("fa4", 2), ("fa3", 3), ("fa2", 4), ("cutile (recorded)", 5), ("flex", 6)];
const OURS: &str = "fa (this project)";

/// Which name has which colour.
#[derive(Default)]
struct Colors(Vec<(String, usize, bool)>);

impl Colors {
    fn of(&mut self, name: &str, dashed: bool) -> usize {
        if let Some((_, color, _)) = self.0.iter().find(|(known, ..)| known == name) {
            return *color;
        }
        let known = KNOWN.iter().find(|(known, _)| *known == name).map(|(_, color)| *color);
        let free = || (0..).find(|color| self.0.iter().all(|(_, used, _)| used != color)).unwrap_or(0);
        let color = known.unwrap_or_else(free);
        self.0.push((name.to_owned(), color, dashed));
        color
    }

    /// In the order of colours, ours first.
    fn legend(&self) -> Vec<plot::Key> {
        let mut keys = self.0.clone();
        keys.sort_by_key(|(_, color, dashed)| (*dashed, *color));
        let key = |(name, color, dashed)| plot::Key { name, color, dashed };
        keys.into_iter().map(key).collect()
    }
}

fn lines(rows: &[&Row], colors: &mut Colors) -> Vec<Series> {
    // Several kernels of ours on one shape are a line each.
    let mut count = BTreeMap::new();
    rows.iter().for_each(|row| *count.entry(row.seqlen_k).or_insert(0usize) += 1);
    let many = count.values().any(|&n| n > 1);
    let mut series: Vec<Series> = Vec::new();
    let mut add =
        |name: &str, dashed: bool, point: (f64, f64)| match series.iter_mut().find(|line| line.label == name)
        {
            Some(line) => line.points.push(point),
            None => {
                let color = colors.of(name, dashed);
                series.push(Series { color, label: name.to_owned(), points: vec![point], dashed });
            }
        };
    for row in rows {
        let name = if many { &row.spec } else { OURS };
        add(name, false, (row.seqlen_k as f64, row.rate()));
    }
    for row in rows {
        for (name, rate) in &row.peers {
            add(name, true, (row.seqlen_k as f64, *rate));
        }
        if let Some(rate) = row.recorded.get("cutile") {
            add("cutile (recorded)", true, (row.seqlen_k as f64, *rate));
        }
    }
    for line in &mut series {
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
        if line.dashed {
            line.points.dedup_by(|a, b| a.0 == b.0);
        }
    }
    series
}
