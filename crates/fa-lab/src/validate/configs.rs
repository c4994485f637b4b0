//! `fa validate --all-configs`: every configuration that the planner lists, compiled, validated and measured, and how good
//! the planner's predictions are.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;
use std::path::Path;

use fa_core::{Arch, Family, Pass};
use fa_kernels::{Compiler, CompilerKind, Report};
use fa_planner::cost::rank_correlation;

use serde::Serialize;

use super::args::ValidateArgs;
use super::cases::{Action, Case, Extent, NamedSpec, of_spec};
use super::worker::{CaseResult, Status};
use crate::configs::{self, Built, Config, NEAR_MISS, SEQLEN};
use crate::record::{self, Provenance};
use crate::term::failure::Verdict;
use crate::term::output;

/// Lines of a kind that a text lists.
const MOST_LINES: usize = 12;

/// What became of a configuration.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// As planned and as compiled.
    #[serde(flatten)]
    pub built: Built,
    /// Whether its results are right; `None` where it was not run.
    pub right: Option<bool>,
    /// What the planner predicts.
    pub tflops_predicted: f64,
    /// What was measured, where it is right.
    pub tflops: Option<f64>,
}

/// All configurations of one problem.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Head dims and mask.
    pub problem: String,
    /// Configurations that the planner says fit.
    pub fit: usize,
    /// Of those, how many compile cleanly.
    pub clean: usize,
    /// Configurations that the planner rejects for registers by little, and the compiler builds cleanly.
    pub clean_though_rejected: usize,
    /// Right ones among those run.
    pub right: usize,
    /// Wrong ones.
    pub wrong: usize,
    /// Rank correlation of predicted and measured rates (Spearman's rho) over the configurations that fit.
    pub rank_correlation: Option<f64>,
    /// The planner's first clean choice and its measured rate.
    pub first_choice: Option<(String, f64)>,
    /// The best by measurement and its rate.
    pub best: Option<(String, f64)>,
}

/// What is printed and recorded.
#[derive(Debug, Serialize)]
struct Record {
    kind: &'static str,
    passed: bool,
    #[serde(flatten)]
    provenance: Provenance,
    seqlen: usize,
    summaries: Vec<Summary>,
    rows: Vec<Row>,
}

/// The numerics and the measurement of a configuration.
fn cases_of(config: &Config) -> Vec<Case> {
    let name = config.spec.to_string();
    let mut cases = of_spec("configs", &name, &config.spec, Extent::Quick);
    let kernel = Some(NamedSpec { name, spec: config.spec.clone() });
    let measured = Case { action: Action::Measure, kernel, ..super::cases::case("configs", config.problem) };
    cases.push(Case { pass: config.spec.kernel.pass(), ..measured });
    cases
}

/// The cases of all configurations.
pub fn cases(configs: &[Config]) -> Vec<Case> {
    configs.iter().flat_map(cases_of).collect()
}

/// Compiles, validates and measures. `work` runs the cases but for those of the given names.
///
/// # Errors
/// When there is no compiler, or the worker cannot go on.
pub fn command(
    args: &ValidateArgs,
    (family, arch): (Family, Arch),
    provenance: impl FnOnce() -> anyhow::Result<Provenance>,
    work: impl FnOnce(Vec<CaseResult>) -> anyhow::Result<Vec<CaseResult>>,
) -> anyhow::Result<Verdict> {
    let configs = configs::list(&args.headdim, args.pass()?, family, arch)?;
    let reports = configs::compile(&configs, arch, &Compiler::find(CompilerKind::Nvrtc)?);
    // The worker passes over what it is told is done.
    let unclean = configs.iter().zip(&reports).filter(|(_, report)| !is_clean(report));
    let skipped = unclean.flat_map(|(config, _)| cases_of(config)).map(|case| CaseResult {
        name: case.name(),
        kernel: String::new(),
        status: Status::Skipped,
        ratio: 0.0,
        detail: "does not compile cleanly".to_owned(),
        ms: None,
    });
    let results = work(skipped.collect())?;
    let by_name: HashMap<&str, &CaseResult> =
        results.iter().map(|result| (result.name.as_str(), result)).collect();
    let rows: Vec<Row> =
        configs.iter().zip(&reports).map(|(config, report)| row(config, report, &by_name)).collect();
    let summaries = summaries(&rows);
    let passed = rows.iter().all(|row| row.right != Some(false));
    let record =
        Record { kind: "configs", passed, provenance: provenance()?, seqlen: SEQLEN, summaries, rows };
    if args.record {
        let kernels = format!("{family}{}", args.suffix());
        let page = markdown(&title(family, args.pass()?), &record, &results);
        write_record(&args.results, &kernels, &record, &page)?;
    }
    if args.json {
        output::print_json(&record)?
    } else {
        output::print(&text(&record, &results))?
    }
    Ok(if passed { Verdict::Good } else { Verdict::Bad })
}

fn is_clean(report: &Result<Report, String>) -> bool {
    report.as_ref().is_ok_and(|report| report.fault().is_none())
}

fn row(config: &Config, report: &Result<Report, String>, results: &HashMap<&str, &CaseResult>) -> Row {
    let cases = cases_of(config);
    let found: Vec<&CaseResult> =
        cases.iter().filter_map(|case| results.get(case.name().as_str()).copied()).collect();
    let run: Vec<&CaseResult> = found.into_iter().filter(|result| result.status != Status::Skipped).collect();
    let right = (!run.is_empty()).then(|| run.iter().all(|result| result.status == Status::Passed));
    let ms = run.iter().find_map(|result| result.ms).filter(|_| right == Some(true));
    Row {
        built: config.built(report),
        right,
        tflops_predicted: config.planned.tflops,
        tflops: ms.map(|ms| config.problem.flops(config.spec.kernel.pass()) / ms / 1e9),
    }
}

fn summaries(rows: &[Row]) -> Vec<Summary> {
    let mut seen = HashSet::new();
    let problems: Vec<&String> =
        rows.iter().map(|row| &row.built.problem).filter(|problem| seen.insert(*problem)).collect();
    problems.into_iter().map(|problem| summary(problem, rows)).collect()
}

fn summary(problem: &str, rows: &[Row]) -> Summary {
    let own: Vec<&Row> = rows.iter().filter(|row| row.built.problem == problem).collect();
    let clean = |row: &&&Row| row.built.fault.is_none();
    let fit: Vec<&Row> = own.iter().filter(|row| row.built.fits).copied().collect();
    let measured: Vec<(f64, f64)> =
        fit.iter().filter_map(|row| Some((row.tflops_predicted, row.tflops?))).collect();
    let rate = |row: &&Row| Some((row.built.kernel.clone(), row.tflops?));
    Summary {
        problem: problem.to_owned(),
        fit: fit.len(),
        clean: fit.iter().filter(clean).count(),
        clean_though_rejected: own.iter().filter(|row| !row.built.fits).filter(clean).count(),
        right: own.iter().filter(|row| row.right == Some(true)).count(),
        wrong: own.iter().filter(|row| row.right == Some(false)).count(),
        rank_correlation: rank_correlation(&measured),
        // Rows stand in the planner's order.
        first_choice: fit.iter().find(|row| row.built.fault.is_none()).and_then(rate),
        best: own.iter().filter_map(rate).max_by(|a, b| a.1.total_cmp(&b.1)),
    }
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

fn text(record: &Record, results: &[CaseResult]) -> String {
    let mut text = output::table_text(&summary_table(&record.summaries));
    let failed = results.iter().filter(|result| result.status == Status::Failed);
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

fn markdown(title: &str, record: &Record, cases: &[CaseResult]) -> String {
    let Provenance { command, commit, date, device, compiler, .. } = &record.provenance;
    let mut text = format!(
        "# {title}\n\n`{command}`, commit {commit}, {date}\n\n{} ({} SMs), driver {}, \
         CUDA {}, {compiler}\n\nbf16, batch x seqlen 16,384, seqlen {}, heads x head dim 2,048. Rates in TFLOP/s by CUDA events. \
         A configuration is measured when it compiles without spills and forbidden warnings; \"clean though rejected\" \
         are those that the planner's register model rejects by at most {:.0} % and the compiler builds cleanly.\n\n",
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
    let wrong: Vec<&CaseResult> = cases.iter().filter(|result| result.status == Status::Failed).collect();
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
    use crate::flags::HeadDim;

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

    #[test]
    fn configurations_have_unique_names_and_near_misses_among_them() {
        let dims = [HeadDim { qk: 128, v: 128 }, HeadDim { qk: 256, v: 256 }];
        let backward = |deterministic| Pass::Backward { deterministic };
        let passes = [Pass::Forward, backward(false), backward(true)];
        for (backward, family) in
            passes.into_iter().flat_map(|pass| [(pass, Family::Sm80), (pass, Family::Sm90)])
        {
            let found = configs::list(&dims, backward, family, Arch::Sm90).unwrap();
            assert!(found.iter().any(|config| !config.planned.fits), "{family} {backward:?}");
            assert!(found.iter().filter(|config| config.planned.fits).count() > 20, "{family} {backward:?}");
            let mut names = HashSet::new();
            assert!(cases(&found).iter().all(|case| names.insert(case.name())), "{family} {backward:?}");
        }
    }
}
