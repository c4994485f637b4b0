//! The plot: one panel per head dim, mask and type, our rate and the others' over sequence length; shapes
//! that are no series as bars, each beside its name.

use std::collections::{BTreeMap, BTreeSet};

use fa_lab::shape::pair;
use serde::Deserialize;

use crate::draw::bars::{Bars, Group, Kind};
use crate::draw::chart::{Chart, Series};
use crate::draw::plot::{self, Panel};

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
    name: Option<String>,
    group: Option<String>,
    #[serde(default)]
    batch: usize,
    #[serde(default)]
    heads_q: usize,
    #[serde(default)]
    heads_kv: usize,
    #[serde(default)]
    seqlen_q: usize,
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
    error: Option<String>,
}

impl Row {
    fn rate(&self) -> f64 {
        self.rate.unwrap_or(self.tflops)
    }

    fn pass(&self) -> &str {
        if self.kind == "bwd" { "Backward" } else { "Forward" }
    }

    /// The groups of the marks name their type.
    fn shapes(&self) -> &str {
        self.group.as_deref().filter(|group| *group != "all").unwrap_or(&self.dtype)
    }

    fn title(&self) -> String {
        let head_dims = pair(self.head_dim, self.head_dim_v, '-');
        format!("head dim {head_dims}, {}, {}", self.mask, self.shapes())
    }

    /// Its name, or else its shape.
    fn label(&self) -> String {
        self.name.clone().unwrap_or_else(|| {
            let lengths = pair(self.seqlen_q, self.seqlen_k, 'x');
            let heads = pair(self.heads_q, self.heads_kv, ':');
            let head_dims = pair(self.head_dim, self.head_dim_v, '-');
            format!("{} x {lengths}, {heads}, hd {head_dims} {}", self.batch, self.mask)
        })
    }

    fn unit(&self) -> &str {
        self.unit.as_deref().unwrap_or("TFLOP/s")
    }
}

/// What a panel shows.
enum Shown {
    Lines(Chart),
    Bars(Bars),
}

/// Whether rows differ in their lengths alone, or in the kernel: lines join what can be joined.
fn are_series(rows: &[&Row]) -> bool {
    let heads = |row: &Row| (row.heads_q, row.heads_kv);
    let one_each = || {
        let points: BTreeSet<(&str, usize)> = rows.iter().map(|row| (&*row.spec, row.seqlen_k)).collect();
        points.len() == rows.len()
    };
    let rate = |unit: &str| ["TFLOP/s", "TB/s"].contains(&unit);
    rows.iter().all(|row| row.name.is_none() && heads(row) == heads(rows[0]) && rate(row.unit()))
        && one_each()
}

/// Bars of rows, and of their peers.
fn bars(title: String, rows: &[&Row], colors: &mut Colors) -> Bars {
    let mut names = vec![OURS];
    for name in rows.iter().flat_map(|row| row.peers.keys()) {
        if !names.contains(&&**name) {
            names.push(name);
        }
    }
    let group = |row: &&Row| Group {
        label: row.label(),
        values: std::iter::once(Some(row.rate()))
            .chain(names[1..].iter().map(|name| row.peers.get(*name).copied()))
            .collect(),
    };
    Bars {
        title,
        x_label: rows.first().map_or("", |row| row.unit()).to_owned(),
        groups: rows.iter().map(group).collect(),
        kind: Kind::Values(names.iter().map(|name| colors.of(name, *name != OURS)).collect()),
        series: names.into_iter().map(str::to_owned).collect(),
        label_room: None,
    }
}

impl Record {
    /// Draws the record as an SVG document: one legend, one scale for the panels of a row.
    ///
    /// # Errors
    /// What the drawing library reports.
    pub(crate) fn draw(&self) -> anyhow::Result<String> {
        let rows: Vec<&Row> = self.rows.iter().filter(|row| row.error.is_none()).collect();
        // Of a group either all panels are lines, or it is one of bars.
        let group = |row: &Row| (row.pass().to_owned(), row.shapes().to_owned(), row.unit().to_owned());
        // A pass that all panels have is in the heading.
        let pass = rows.first().map(|first| first.pass());
        let pass = pass.filter(|pass| rows.iter().all(|row| row.pass() == *pass));
        let titled = |row: &Row, title: &str| match pass {
            Some(_) => title.to_owned(),
            None => format!("{}, {title}", row.pass()),
        };
        let mut colors = Colors::default();
        let mut panels: Vec<Shown> = Vec::new();
        for of_group in firsts(&rows, group) {
            let by_title = firsts(&of_group, Row::title);
            if by_title.iter().all(|own| are_series(own)) {
                panels.extend(by_title.into_iter().map(|own| {
                    let y_label = if own[0].unit() == "TB/s" { "TB/s" } else { "TFLOP/s" };
                    let series = lines(&own, &mut colors);
                    let (title, x_label) =
                        (capitalised(&titled(own[0], &own[0].title())), "keys per sequence");
                    Shown::Lines(Chart { title, x_label, y_label, ceiling: None, series, shared: None })
                }));
            } else {
                let title = titled(of_group[0], of_group[0].shapes());
                panels.push(Shown::Bars(bars(title, &of_group, &mut colors)));
            }
        }
        for row in panels.chunks_mut(COLUMNS) {
            let mut tops: BTreeMap<&str, f64> = BTreeMap::new();
            let charts = |row: &mut [Shown], each: &mut dyn FnMut(&mut Chart)| {
                row.iter_mut().for_each(|panel| {
                    if let Shown::Lines(chart) = panel {
                        each(chart)
                    }
                });
            };
            charts(row, &mut |chart| {
                let top = tops.entry(chart.y_label).or_insert(0.0);
                *top = top.max(chart.top());
            });
            charts(row, &mut |chart| chart.shared = Some(tops[chart.y_label]));
        }
        let machine = self.gpu.as_ref().or(self.machine.as_ref().map(|machine| &machine.cpu));
        let medians = self.reps.map_or("medians".to_owned(), |reps| format!("medians of {reps} launches"));
        let machine = machine.map_or("a machine", |name| name);
        let heading = match pass {
            Some(pass) => format!("{pass} on {machine}, {medians}"),
            None => format!("{machine}, {medians}"),
        };
        let boxed = |panel| -> Box<dyn Panel> {
            match panel {
                Shown::Lines(chart) => Box::new(chart),
                Shown::Bars(bars) => Box::new(bars),
            }
        };
        let panels: Vec<Box<dyn Panel>> = panels.into_iter().map(boxed).collect();
        plot::sheet_with_legend(&heading, &colors.legend(), COLUMNS, &panels)
    }
}

/// Ours, and the peers that have a colour of their own in every plot, with their names there.
const KNOWN: [(&str, &str, usize); 6] = [
    (OURS, OURS, 0),
    ("cudnn", "cuDNN", 1),
    ("fa4", "FlashAttention-4", 2),
    ("fa3", "FlashAttention-3", 3),
    ("fa2", "FlashAttention-2", 4),
    ("flex", "FlexAttention", 6),
];
const OURS: &str = "fa (this project)";

/// The same with a capital letter.
fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// Which name has which colour.
#[derive(Default)]
struct Colors(Vec<(String, usize, bool)>);

impl Colors {
    fn of(&mut self, name: &str, dashed: bool) -> usize {
        if let Some((_, color, _)) = self.0.iter().find(|(known, ..)| known == name) {
            return *color;
        }
        let known = KNOWN.iter().find(|(known, ..)| *known == name).map(|(.., color)| *color);
        let free = || (0..).find(|color| self.0.iter().all(|(_, used, _)| used != color)).unwrap_or(0);
        let color = known.unwrap_or_else(free);
        self.0.push((name.to_owned(), color, dashed));
        color
    }

    /// In the order of colours, ours first.
    fn legend(&self) -> Vec<plot::Key> {
        let mut keys = self.0.clone();
        keys.sort_by_key(|(_, color, dashed)| (*dashed, *color));
        let key = |(name, color, dashed): (String, usize, bool)| {
            let shown =
                KNOWN.iter().find(|(known, ..)| *known == name).map(|(_, shown, _)| (*shown).to_owned());
            plot::Key { name: shown.unwrap_or(name), color, dashed }
        };
        keys.into_iter().map(key).collect()
    }
}

/// Rows with equal keys, in the order of their first ones.
fn firsts<'a, K: PartialEq>(rows: &[&'a Row], key: impl Fn(&Row) -> K) -> Vec<Vec<&'a Row>> {
    let mut found: Vec<(K, Vec<&Row>)> = Vec::new();
    for row in rows {
        let own = key(row);
        match found.iter_mut().find(|(known, _)| *known == own) {
            Some((_, rows)) => rows.push(row),
            None => found.push((own, vec![row])),
        }
    }
    found.into_iter().map(|(_, rows)| rows).collect()
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
    }
    for line in &mut series {
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
        if line.dashed {
            line.points.dedup_by(|a, b| a.0 == b.0);
        }
    }
    series
}
