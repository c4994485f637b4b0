//! The drawing of a ladder's record: steps as ratios to the first one.

use std::collections::BTreeMap;

use fa_lab::shape::Shape;
use serde::Deserialize;

use crate::draw::bars::{Bars, Group, Kind};
use crate::draw::chart::{Chart, Series};
use crate::draw::plot::{self, Panel};

/// A record as `--json` writes it, as far as it is drawn.
#[derive(Deserialize)]
pub(crate) struct Record {
    gpu: String,
    rows: Vec<Row>,
}

#[derive(Clone, Deserialize)]
struct Row {
    ladder: String,
    step: String,
    #[serde(flatten)]
    shape: Shape,
    tflops: Option<f64>,
    ratio: Option<f64>,
    published_ratio: Option<f64>,
}

/// The ladders of the SM80-class forward, which others have published too.
const MEMORY: &str = "memory";
const TILES: &str = "tiles";

/// Colours in the palette: ours, and what was published, which is no library of the other plots.
const OURS: usize = 0;
const PUBLISHED: usize = 6;

impl Record {
    /// The rows of each ladder on each shape.
    fn ladders(&self) -> impl Iterator<Item = &[Row]> {
        self.rows.chunk_by(|a, b| a.ladder == b.ladder && a.shape == b.shape)
    }

    /// Draws it as an SVG document: steps as ratios to the first, next to what was published; where there are
    /// several lengths also rates over them.
    ///
    /// # Errors
    /// What the drawing library reports.
    pub(crate) fn draw(&self) -> anyhow::Result<String> {
        let of = |name: &str| -> Vec<Vec<Row>> {
            self.ladders().filter(|rows| rows[0].ladder == name).map(<[Row]>::to_vec).collect()
        };
        let labels: Vec<&str> = self.rows.iter().map(|row| &*row.step).collect();
        let label_room = Some(plot::widest(&labels)?);
        let ratios = |title: String, published_on: &str, climbs: &[Vec<Row>]| Bars {
            title,
            x_label: "rate over the first step's".to_owned(),
            series: vec!["this project".to_owned(), format!("published ({published_on})")],
            groups: groups(climbs),
            kind: Kind::Ratios(vec![OURS, PUBLISHED]),
            label_room,
        };
        let (memory, tiles) = (of(MEMORY), of(TILES));
        let mut panels: Vec<Box<dyn Panel>> = Vec::new();
        if let Some(rows) = memory.first() {
            let title = format!("From naive to pipelined, {}", rows[0].shape.words());
            panels.push(Box::new(ratios(title, "A10G", &memory)));
        }
        if !tiles.is_empty() {
            panels.push(Box::new(Chart {
                title: "From small tiles to tuned ones, B 4 H 32 hd 128 causal f16".to_owned(),
                x_label: "keys per sequence",
                y_label: "TFLOP/s",
                ceiling: None,
                series: lines(&tiles),
                shared: None,
            }));
            let title = "The same as ratio to small tiles, geometric mean over lengths".to_owned();
            panels.push(Box::new(ratios(title, "B200", &tiles)));
        }
        for rows in self.ladders().filter(|rows| ![MEMORY, TILES].contains(&&*rows[0].ladder)) {
            let rate = rows[0].tflops.map_or("-".to_owned(), |rate| format!("{rate:.0}"));
            panels.push(Box::new(Bars {
                title: format!("One knob turned, {}", rows[0].shape.words()),
                x_label: format!("rate over the base's {rate} TFLOP/s"),
                series: vec!["this project".to_owned()],
                groups: groups(&[rows.to_vec()]),
                kind: Kind::Ratios(vec![OURS]),
                label_room,
            }));
        }
        plot::sheet(&format!("Optimisation steps on {}", self.gpu), 1, &panels)
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
        let rows = || climbs.iter().filter_map(|rows| rows.get(index));
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
    for rows in climbs {
        for (index, row) in rows.iter().enumerate() {
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
