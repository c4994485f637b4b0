//! `fa validate --all-configs`: every configuration that the planner lists, compiled, validated and measured,
//! and how good the planner's predictions are.

use std::fmt::Write;

use fa_lab::Program;
use fa_lab::record;
use fa_lab::summary::{self, Kind};
use fa_lab::validate::configs::{self, Record, Row, Summary};
use fa_lab::validate::{Options, Status};

use super::args::ValidateArgs;
use crate::term::failure::Verdict;
use crate::term::{output, progress};

/// Lines of a kind that a text lists.
const MOST_LINES: usize = 12;

/// Runs the command: a bad verdict when a configuration is wrong.
///
/// # Errors
/// When there is no GPU or compiler, or the workers cannot go on.
pub(crate) fn command(args: &ValidateArgs, options: &Options, program: &Program) -> anyhow::Result<Verdict> {
    let record = configs::run(options, &args.headdim, program, &mut progress::steps())?;
    if args.record {
        let name = format!("{}{}-{}.json", record.family, args.suffix(), record.provenance.gpu_slug());
        let text = summary::of(&serde_json::to_value(&record)?)?;
        let path = record::write(&args.results, Kind::Configs.folder(), &name, &text)?;
        eprintln!("wrote {}", path.display());
    }
    if args.json {
        output::print_json(&record)?
    } else {
        output::print(&text(&record))?
    }
    Ok(if record.passed { Verdict::Good } else { Verdict::Bad })
}

fn summary_table(summaries: &[Summary]) -> comfy_table::Table {
    let mut table = output::table(&[
        "problem",
        "fit",
        "clean",
        "clean though rejected",
        "right",
        "wrong",
        "rank corr.",
        "first choice TFLOP/s",
        "best TFLOP/s",
        "of best",
        "best configuration",
    ]);
    for summary in summaries {
        let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.0}"));
        let first = summary.first_choice.as_ref().map(|(_, rate)| *rate);
        let best = summary.best.as_ref().map(|(_, rate)| *rate);
        let share = first.zip(best).map_or("-".to_owned(), |(a, b)| format!("{:.1} %", 100.0 * a / b));
        table.add_row([
            summary.problem.clone(),
            summary.fit.to_string(),
            summary.clean.to_string(),
            summary.clean_though_rejected.to_string(),
            summary.right.to_string(),
            summary.wrong.to_string(),
            summary.rank_correlation.map_or("-".to_owned(), |rho| format!("{rho:.3}")),
            number(first),
            number(best),
            share,
            summary.best.as_ref().map_or("-".to_owned(), |(name, _)| name.clone()),
        ]);
    }
    table
}

fn text(record: &Record) -> String {
    let mut text = output::table_text(&summary_table(&record.summaries));
    let failed = record.cases.iter().filter(|result| result.status == Status::Failed);
    for result in failed.take(MOST_LINES) {
        let _ = writeln!(text, "FAILED {}: {}", result.name, result.detail);
    }
    let contradicted: Vec<&Row> =
        record.rows.iter().filter(|row| row.built.fits && row.built.fault.is_some()).collect();
    for row in contradicted.iter().take(MOST_LINES) {
        let _ = writeln!(
            text,
            "fits by plan ({} of {} registers), but {}: {}",
            row.built.registers_planned,
            row.built.register_limit,
            row.built.kernel,
            row.built.verdict()
        );
    }
    if contradicted.len() > MOST_LINES {
        let _ = writeln!(text, "and {} more; --json lists all", contradicted.len() - MOST_LINES);
    }
    text
}
