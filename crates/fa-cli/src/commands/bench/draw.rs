//! The plot: one panel per head dim, mask and type, our rate and the others' over sequence length.

use fa_lab::bench::report::{Report, Row};

use crate::draw::chart::{Chart, Series};
use crate::draw::plot::{self, Panel};

/// Panels side by side.
const COLUMNS: usize = 2;

/// Draws the report as an SVG document.
///
/// # Errors
/// What the drawing library reports.
pub fn panels(report: &Report) -> anyhow::Result<String> {
    let mut titles: Vec<String> = Vec::new();
    let title = |row: &Row| {
        let pass = if row.kind == "bwd" { "Backward" } else { "Forward" };
        // The groups of the marks name their type.
        let shapes = if row.group == "all" { row.shape.dtype.to_string() } else { row.group.to_owned() };
        format!("{pass}, head dim {}, {}, {shapes}", row.shape.head_dims(), row.shape.mask)
    };
    for row in report.rows.iter().filter(|row| row.error.is_none()) {
        if !titles.contains(&title(row)) {
            titles.push(title(row));
        }
    }
    let panel = |title_of: String| {
        let rows: Vec<&Row> =
            report.rows.iter().filter(|row| row.error.is_none() && title(row) == title_of).collect();
        let series = lines(report, &rows);
        let y_label = rows.first().map_or("TFLOP/s", |row| row.unit.name());
        let x_label = "keys per sequence";
        Box::new(Chart { title: title_of, x_label, y_label, ceiling: None, series }) as Box<dyn Panel>
    };
    let panels: Vec<Box<dyn Panel>> = titles.into_iter().map(panel).collect();
    let heading = format!("{}, medians of {} launches", report.provenance.device.gpu, report.reps);
    plot::sheet(&heading, COLUMNS, &panels)
}

fn lines(report: &Report, rows: &[&Row]) -> Vec<Series> {
    let point = |row: &Row, rate: f64| (row.shape.seqlen_k as f64, rate);
    let mut series: Vec<Series> = Vec::new();
    // Several kernels of ours on one shape are a line each.
    let mut count = std::collections::BTreeMap::new();
    rows.iter().for_each(|row| *count.entry(row.shape.seqlen_k).or_insert(0usize) += 1);
    let many = count.values().any(|&n| n > 1);
    for row in rows {
        let label = if many { row.spec.clone() } else { "fa (this project)".to_owned() };
        match series.iter_mut().find(|line| line.label == label) {
            Some(line) => line.points.push(point(row, row.rate)),
            None => series.push(Series {
                color: series.len(),
                label,
                points: vec![point(row, row.rate)],
                dashed: false,
            }),
        }
    }
    let ours = series.len();
    let mut others = |color: usize, name: &str, rate: &dyn Fn(&Row) -> Option<f64>| {
        let mut points: Vec<(f64, f64)> =
            rows.iter().filter_map(|row| Some(point(row, rate(row)?))).collect();
        points.dedup_by(|a, b| a.0 == b.0);
        if !points.is_empty() {
            series.push(Series { label: name.to_owned(), points, color, dashed: true });
        }
    };
    // A peer has one colour in all panels, whoever is missing there.
    let names = report.peer_names();
    for (index, name) in names.iter().enumerate() {
        others(ours + index, name, &|row| row.peers.get(name).copied());
    }
    others(ours + names.len(), "cutile (recorded)", &|row| row.recorded.get("cutile").copied());
    for line in &mut series {
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    series
}
