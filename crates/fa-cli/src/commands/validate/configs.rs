//! `fa validate --all-configs`: every configuration that the planner lists, compiled, validated and measured,
//! and how good the planner's predictions are.

use std::fmt::Write;
use std::path::Path;

use fa_core::{Family, Pass};
use fa_lab::Program;
use fa_lab::configs::NEAR_MISS;
use fa_lab::record::{self, Provenance};
use fa_lab::validate::configs::{self, Record, Row, Summary};
use fa_lab::validate::{CaseResult, Options, Status};

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
        let kernels = format!("{}{}", record.family, args.suffix());
        let page = markdown(&title(record.family, options.pass), &record);
        write_record(&args.results, &kernels, &record, &page)?;
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
        let _ = writeln!(text, "and {} more; --json and --record list all", contradicted.len() - MOST_LINES);
    }
    text
}

fn write_record(results: &Path, kernels: &str, record: &Record, page: &str) -> anyhow::Result<()> {
    let name = format!("{kernels}-{}", record.provenance.gpu_slug());
    let json = record::write(results, "configs", &format!("{name}.json"), &output::json_text(record)?)?;
    let page = record::write(results, "configs", &format!("{name}.md"), page)?;
    eprintln!("wrote {} and {}", json.display(), page.display());
    Ok(())
}

/// The title of a page: kernels, pass and determinism.
fn title(family: Family, pass: Pass) -> String {
    format!("Every {} {pass} configuration: predicted and measured", family.name().to_uppercase())
}

fn markdown(title: &str, record: &Record) -> String {
    let Provenance { command, commit, date, device, compiler, .. } = &record.provenance;
    let mut text = format!(
        "# {title}\n\n`{command}`, commit {commit}, {date}\n\n{} ({} SMs), driver {}, \
         CUDA {}, {compiler}\n\nbf16, batch x seqlen 16,384, seqlen {}, heads x head dim 2,048. Rates in \
         TFLOP/s by CUDA events. A configuration is measured when it compiles without spills and forbidden \
         warnings; \"clean though rejected\" are those that the planner's register model rejects by at most \
         {:.0} % and the compiler builds cleanly.\n\n",
        device.gpu,
        device.sms,
        device.driver.as_deref().unwrap_or("unknown"),
        device.cuda,
        record.seqlen,
        NEAR_MISS * 100.0
    );
    let mut table = summary_table(&record.summaries);
    table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
    text += &output::table_text(&table);
    for summary in &record.summaries {
        let own = record.rows.iter().filter(|row| row.built.problem == summary.problem);
        let mut rows: Vec<&Row> = own.collect();
        rows.sort_by(|a, b| b.tflops.unwrap_or(0.0).total_cmp(&a.tflops.unwrap_or(0.0)));
        let _ = write!(text, "\n## {}\n\n", summary.problem);
        let mut table = output::table(&[
            "configuration",
            "plan",
            "registers planned",
            "spill B",
            "smem B",
            "predicted",
            "measured",
        ]);
        table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
        for row in rows {
            table.add_row([
                row.built.kernel.clone(),
                if row.built.fits { "fits" } else { "rejected" }.to_owned(),
                format!("{} of {}", row.built.registers_planned, row.built.register_limit),
                row.built.spills.map_or("-".to_owned(), |spills| spills.to_string()),
                row.built.smem.to_string(),
                format!("{:.0}", row.tflops_predicted),
                match (row.tflops, row.right, &row.built.fault) {
                    (Some(rate), ..) => format!("{rate:.0}"),
                    (None, Some(false), _) => "WRONG".to_owned(),
                    (None, _, Some(fault)) => fault.split(':').next().unwrap_or_default().to_owned(),
                    _ => "-".to_owned(),
                },
            ]);
        }
        text += &output::table_text(&table);
    }
    let wrong: Vec<&CaseResult> =
        record.cases.iter().filter(|result| result.status == Status::Failed).collect();
    if !wrong.is_empty() {
        text += "\n## Wrong\n\n";
        for result in wrong {
            let _ = writeln!(text, "- {}: {}", result.name, result.detail);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn titles_name_the_pass() {
        let backward = |deterministic| Pass::Backward { deterministic };
        assert_eq!(
            title(Family::Sm80, Pass::Forward),
            "Every SM80 forward configuration: predicted and measured"
        );
        assert_eq!(
            title(Family::Sm90, backward(false)),
            "Every SM90 backward configuration: predicted and measured"
        );
        assert_eq!(
            title(Family::Sm90, backward(true)),
            "Every SM90 deterministic backward configuration: predicted and measured"
        );
    }
}
