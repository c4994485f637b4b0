//! The rows of a benchmark on the GPU as a table.

use fa_lab::bench::report::{PeersRecord, Report};
use fa_lab::marks::Unit;
use fa_lab::peers::Ceilings;
use fa_lab::record::Provenance;

use crate::term::output;

/// What all rates are in, where that is one thing.
fn unit(report: &Report) -> Option<&'static str> {
    let first = report.rows.first()?.unit;
    report.rows.iter().all(|row| row.unit == first).then_some(first.name())
}

/// For people: the rows, then the summary.
pub(crate) fn table(report: &Report) -> String {
    let Provenance { device, compiler, commit, .. } = &report.provenance;
    let driver = device.driver.as_deref().unwrap_or("unknown");
    let mut text = format!(
        "{}, driver {driver}, CUDA {}, {compiler}, commit {commit}; medians of {} launches\n{}",
        device.gpu,
        device.cuda,
        report.reps,
        rows(report)
    );
    if let Some(PeersRecord { versions, errors, ceilings, .. }) = &report.peers {
        let versions: Vec<String> =
            versions.iter().map(|(name, version)| format!("{name}: {version}")).collect();
        let Ceilings { matmul_tflops, copy_gb_per_s } = ceilings;
        text += &format!(
            "{}; in this run a bf16 product of 8192^3 takes {matmul_tflops:.0} TFLOP/s, a copy \
             {copy_gb_per_s:.0} GB/s\n",
            versions.join(", ")
        );
        for (name, why) in errors {
            text += &format!("no {name}: {why}\n");
        }
    }
    let graphs: std::collections::BTreeSet<usize> = report.rows.iter().filter_map(|row| row.graph).collect();
    for calls in graphs {
        text += &format!("rows of a CUDA graph: {calls} calls in each, of us and of peers; ms of one call\n");
    }
    for s in &report.summary {
        text += &format!(
            "{}, over {}: {} rows, geometric mean {:.3}, lowest {:.3} ({}), {} below 1\n",
            s.group, s.against, s.rows, s.geometric_mean, s.lowest, s.lowest_row, s.below_one
        );
    }
    text
}

/// A line for each row.
fn rows(report: &Report) -> String {
    let names = report.peer_names();
    let with_name = report.rows.iter().any(|row| row.name.is_some());
    let mut header = if with_name { vec!["what"] } else { Vec::new() };
    let unit = unit(report);
    header.extend(["hd", "heads", "batch", "N", "mask", "dtype", "kernel", "ms", unit.unwrap_or("rate")]);
    header.extend(names.iter().map(String::as_str));
    let with_ratio = !names.is_empty();
    header.extend(with_ratio.then_some("ratio"));
    let mut table = output::table(&header);
    for row in &report.rows {
        let name = row.name.unwrap_or("-").to_owned();
        let mut cells = if with_name { vec![name] } else { Vec::new() };
        cells.extend([
            row.shape.head_dims(),
            row.shape.heads(),
            row.shape.batch.to_string(),
            row.shape.rows(),
            row.shape.mask_and_scores(),
            row.shape.types(),
            row.spec.clone(),
        ]);
        match &row.error {
            Some(error) => cells.push(error.clone()),
            None => {
                let text = |rate: f64| match row.unit {
                    Unit::Flops => format!("{rate:.0}"),
                    Unit::KvBytes | Unit::StepMs => format!("{rate:.3}"),
                    Unit::PlanUs => format!("{rate:.2}"),
                };
                let own = text(row.rate);
                let own = if unit.is_some() { own } else { format!("{own} {}", row.unit.name()) };
                cells.extend([format!("{:.4}", row.ms_median), own]);
                let rate = |name| row.peers.get(name).map_or("-".to_owned(), |&rate| text(rate));
                cells.extend(names.iter().map(rate));
                let ratio = row.ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.3}"));
                cells.extend(with_ratio.then_some(ratio));
            }
        }
        table.add_row(cells);
    }
    output::table_text(&table)
}
