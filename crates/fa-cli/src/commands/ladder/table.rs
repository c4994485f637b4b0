//! What was measured of the ladders, as a table.

use fa_lab::ladder::profile;
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

/// A profile for a terminal.
pub(crate) fn profile(report: &profile::Report) -> String {
    let mut text = format!("{} by {}; counters: {}\n", report.arch, report.compiler, report.profiler);
    for rows in report.rows.chunk_by(|a, b| a.ladder == b.ladder && a.shape == b.shape) {
        text += &format!("\n{}: {}\n", rows[0].ladder, rows[0].shape.words());
        let mut header = vec!["step", "registers", "planned", "blocks/SM", "driver's", "occupancy %"];
        let counted = rows.iter().find(|row| !row.measured.is_empty());
        let planned: Vec<&str> = rows[0].planned.keys().copied().collect();
        let measured: Vec<&str> = counted.map_or(Vec::new(), |row| row.measured.keys().copied().collect());
        let planned_names: Vec<String> = planned.iter().map(|name| format!("planned {name}")).collect();
        header.extend(planned_names.iter().map(String::as_str));
        header.extend(&measured);
        let mut table = output::table(&header);
        for row in rows {
            let whole = |value: Option<u32>| value.map_or("-".to_owned(), |value| value.to_string());
            let tenth = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.1}"));
            let mut cells = vec![
                row.step.clone(),
                whole(row.registers),
                whole(row.planned_registers),
                whole(row.blocks_per_sm),
                whole(row.driver_blocks_per_sm),
                tenth(row.occupancy_pct),
            ];
            cells.extend(planned.iter().map(|name| tenth(row.planned.get(name).copied())));
            cells.extend(measured.iter().map(|name| tenth(row.measured.get(name).copied())));
            table.add_row(cells);
        }
        text += &output::table_text(&table);
        for row in rows {
            text += &row.error.as_ref().map_or(String::new(), |error| format!("{}: {error}\n", row.step));
        }
    }
    text
}
