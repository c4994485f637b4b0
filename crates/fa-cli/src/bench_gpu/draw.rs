//! The plot: one panel per head dim, mask and type, our rate and the others' over sequence length.

use crate::chart::{self, Frame, Series};
use crate::svg::{Anchor, Svg};

use super::report::{Report, Row};

/// Panels side by side.
const COLUMNS: usize = 2;

/// Draws the report as an SVG document.
pub fn panels(report: &Report) -> String {
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
    let drawn: Vec<Svg> = titles
        .iter()
        .map(|wanted| {
            let rows: Vec<&Row> =
                report.rows.iter().filter(|row| row.error.is_none() && title(row) == *wanted).collect();
            let series = lines(report, &rows);
            let frame =
                Frame { title: wanted, x_label: "keys per sequence", y_label: "TFLOP/s", ceiling: None };
            chart::lines_svg(&frame, &series)
        })
        .collect();
    let head = 40.0;
    let (width, height) =
        drawn.iter().fold((0.0f64, 0.0f64), |(w, h), svg| (w.max(svg.size().0), h.max(svg.size().1)));
    let rows = drawn.len().div_ceil(COLUMNS);
    let columns = drawn.len().clamp(1, COLUMNS);
    let whole = (width.max(400.0) * columns as f64, head + height * rows as f64);
    let about = &report.provenance.device;
    let label = format!("{}, medians of {} launches", about.gpu, report.reps);
    let mut sheet = Svg::new(whole.0, whole.1, &label);
    sheet.rect([0.0, 0.0, whole.0, whole.1], r##"fill="#ffffff""##, "");
    sheet.text((16.0, 26.0), Anchor::Start, r#"font-size="16" font-weight="600""#, &label);
    for (index, panel) in drawn.into_iter().enumerate() {
        let place = ((index % COLUMNS) as f64 * width, head + (index / COLUMNS) as f64 * height);
        sheet.nest(place, panel);
    }
    sheet.finish()
}

fn lines(report: &Report, rows: &[&Row]) -> Vec<Series> {
    let point = |row: &Row, rate: f64| (row.shape.seqlen_k as f64, rate);
    let mut series: Vec<Series> = Vec::new();
    // Several kernels of ours on one shape are a line each.
    let mut kernels: Vec<String> = Vec::new();
    let mut count = std::collections::BTreeMap::new();
    rows.iter().for_each(|row| *count.entry(row.shape.seqlen_k).or_insert(0usize) += 1);
    let many = count.values().any(|&n| n > 1);
    for row in rows {
        let label = if many { row.spec.clone() } else { "fa (this project)".to_owned() };
        if !kernels.contains(&label) {
            kernels.push(label.clone());
        }
        match series.iter_mut().find(|line| line.label == label) {
            Some(line) => line.points.push(point(row, row.tflops)),
            None => series.push(Series {
                color: series.len(),
                label,
                points: vec![point(row, row.tflops)],
                dashed: false,
            }),
        }
    }
    let ours = series.len();
    let mut others = |name: &str, rate: &dyn Fn(&Row) -> Option<f64>| {
        let mut points: Vec<(f64, f64)> =
            rows.iter().filter_map(|row| Some(point(row, rate(row)?))).collect();
        points.dedup_by(|a, b| a.0 == b.0);
        if !points.is_empty() {
            series.push(Series {
                label: name.to_owned(),
                points,
                color: series.len().max(ours),
                dashed: true,
            });
        }
    };
    for name in report.peer_names() {
        others(&name, &|row| row.peers.get(&name).copied());
    }
    others("cutile (recorded)", &|row| row.recorded.get("cutile").copied());
    for line in &mut series {
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    series
}
