//! The ladders' steps as they were measured, beside the published ladders, and whether the kernels are still
//! those of the record.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, ensure};
use fa_core::{Arch, Family};
use fa_lab::ladder::steps_digest;
use fa_lab::summary;
use serde::Deserialize;

/// The GPU whose records are shown, as their names have it.
const GPU: &str = "h200";

/// A record of `fa ladder`, as far as the table shows it.
#[derive(Deserialize)]
struct Record {
    command: String,
    date: String,
    gpu: String,
    arch: Arch,
    /// Older records have none.
    steps_digest: Option<String>,
    rows: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    ladder: String,
    step: String,
    mask: String,
    tflops: Option<f64>,
    ratio: Option<f64>,
    published_ratio: Option<f64>,
    error: Option<String>,
}

/// Both families' records and steps.
///
/// # Errors
/// Records that cannot be read.
pub(super) fn block(results: &Path) -> anyhow::Result<String> {
    let (mut runs, mut steps) = (String::new(), String::new());
    for family in [Family::Sm80, Family::Sm90] {
        let name = format!("ladder/{family}-{GPU}.json");
        let record: Record = summary::read(&results.join(&name), "fa ladder")?;
        ensure!(!record.rows.is_empty(), "{name} has no rows");
        let today = steps_digest(family, record.arch)?;
        let standing = match record.steps_digest == Some(today) {
            true => "every step's kernel is still the same",
            false => "kernels or steps have changed since",
        };
        let day = record.date.get(..10).unwrap_or(&record.date);
        let command = record.command.split(" --json").next().unwrap_or_default();
        writeln!(runs, "- [{family}](results/{name}), {}, {day}: `{command}`; {standing}", record.gpu)?;
        steps += &rows(&record, family == Family::Sm90)?;
    }
    let head = "| ladder | step | TFLOP/s | of the first step | published |\n|---|---|--:|--:|--:|\n";
    Ok(format!("{runs}\n{head}{steps}"))
}

/// A line for each step, over all lengths; `by_mask` where a ladder has its steps once for each mask.
fn rows(record: &Record, by_mask: bool) -> anyhow::Result<String> {
    let of = |row: &Row| match by_mask {
        true => format!("{} {}, {}", record.arch, row.ladder, row.mask),
        false => row.ladder.clone(),
    };
    let mut keys: Vec<(String, &str)> = Vec::new();
    for row in &record.rows {
        let key = (of(row), row.step.as_str());
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    let mut text = String::new();
    for (ladder, step) in keys {
        let own: Vec<&Row> = record.rows.iter().filter(|row| of(row) == ladder && row.step == step).collect();
        let span = |value: fn(&Row) -> Option<f64>, digits: usize| {
            let values: Vec<f64> = own.iter().filter_map(|row| value(row)).collect();
            let least = values.iter().copied().reduce(f64::min).map(|value| format!("{value:.digits$}"));
            let most = values.iter().copied().reduce(f64::max).map(|value| format!("{value:.digits$}"));
            match (least, most) {
                (Some(least), Some(most)) if least == most => least,
                (Some(least), Some(most)) => format!("{least} to {most}"),
                _ => "-".to_owned(),
            }
        };
        let published = span(|row| row.published_ratio, 2);
        if own.iter().all(|row| row.tflops.is_none()) {
            let why = own[0].error.as_deref().context("a step without a rate has a reason")?;
            writeln!(text, "| {ladder} | {step} | - | {why} | {published} |")?;
        } else {
            let (rate, ratio) = (span(|row| row.tflops, 0), span(|row| row.ratio, 2));
            writeln!(text, "| {ladder} | {step} | {rate} | {ratio} | {published} |")?;
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_a_line_over_all_lengths_and_say_why_they_have_no_rate() {
        let row = |step: &str, rate: Option<f64>, published| Row {
            ladder: "tiles".to_owned(),
            step: step.to_owned(),
            mask: "causal".to_owned(),
            tflops: rate,
            ratio: rate.map(|rate| rate / 200.0),
            published_ratio: published,
            error: rate.is_none().then(|| "shared memory".to_owned()),
        };
        let record = Record {
            command: String::new(),
            date: String::new(),
            gpu: String::new(),
            arch: Arch::Sm90,
            steps_digest: None,
            rows: vec![
                row("small", Some(200.0), Some(1.0)),
                row("large", None, None),
                row("small", Some(282.0), Some(1.0)),
            ],
        };
        assert_eq!(
            rows(&record, false).expect("rows"),
            "| tiles | small | 200 to 282 | 1.00 to 1.41 | 1.00 |\n\
             | tiles | large | - | shared memory | - |\n"
        );
        let by_mask = rows(&record, true).expect("rows");
        assert!(by_mask.starts_with("| sm90 tiles, causal | small |"), "{by_mask}");
    }
}
