//! What was measured of the ladders, as a table and as a drawing.

use std::collections::BTreeMap;

use fa_core::Family;
use fa_lab::ladder::report::{Report, Row};

use crate::draw::bars::{Bars, Group, Kind};
use crate::draw::chart::{Chart, Series};
use crate::draw::plot::{self, Panel};
use crate::term::output;

/// The rows of each ladder on each shape.
fn ladders(report: &Report) -> Vec<&[Row]> {
    report.rows.chunk_by(|a, b| a.ladder == b.ladder && a.shape == b.shape).collect()
}

/// For a terminal.
pub(crate) fn table(report: &Report) -> String {
    let device = &report.provenance.device;
    let driver = device.driver.as_deref().unwrap_or("unknown");
    let mut text = format!("{}, driver {driver}; medians of {} launches\n", device.gpu, report.reps);
    for rows in ladders(report) {
        text += &format!("\n{}: {}\n", rows[0].ladder, rows[0].name());
        let published = rows.iter().any(|row| row.published_ratio.is_some());
        let mut header = vec!["step", "kernel", "ms", "TFLOP/s", "to first"];
        header.extend(published.then_some("published"));
        let mut table = output::table(&header);
        for row in rows {
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
        for row in rows.iter().filter(|row| row.wrong) {
            text += &format!("{}: {}\n", row.step, row.error.as_deref().unwrap_or("wrong"));
        }
    }
    text
}

/// Steps as ratios to the first, next to what was published; where there are several lengths also rates over
/// them.
///
/// # Errors
/// What the drawing library reports.
pub(crate) fn draw(report: &Report) -> anyhow::Result<String> {
    let mut panels: Vec<Box<dyn Panel>> = Vec::new();
    match report.family {
        Family::Sm80 => {
            let of = |name: &str| -> Vec<Vec<Row>> {
                ladders(report).into_iter().filter(|c| c[0].ladder == name).map(<[Row]>::to_vec).collect()
            };
            let ratios = |title: String, published_on: &str, climbs: &[Vec<Row>]| Bars {
                title,
                x_label: "rate over the first step's".to_owned(),
                series: vec!["this project".to_owned(), format!("published ({published_on})")],
                groups: groups(climbs),
                kind: Kind::Ratios,
            };
            let (memory, tiles) = (of("memory"), of("tiles"));
            if let Some(rows) = memory.first() {
                let title = format!("From naive to pipelined, {}", rows[0].name());
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
        }
        Family::Sm90 | Family::Sm100 => {
            for rows in ladders(report) {
                let rate = rows[0].tflops.map_or("-".to_owned(), |rate| format!("{rate:.0}"));
                panels.push(Box::new(Bars {
                    title: format!("One knob turned, {}", rows[0].name()),
                    x_label: format!("rate over the base's {rate} TFLOP/s"),
                    series: vec!["this project".to_owned()],
                    groups: groups(&[rows.to_vec()]),
                    kind: Kind::Ratios,
                }));
            }
        }
    }
    plot::sheet(&format!("Optimisation steps on {}", report.provenance.device.gpu), 1, &panels)
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
