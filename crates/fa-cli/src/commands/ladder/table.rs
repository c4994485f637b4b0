//! What was measured of the ladders, as a table.

use fa_lab::ladder::report::{Report, Row};

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
        text += &format!("\n{}: {}\n", rows[0].ladder, rows[0].shape.words());
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
