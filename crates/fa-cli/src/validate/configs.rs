//! `fa validate --all-configs`: every configuration that the planner lists, compiled, validated and measured, and how good
//! the planner's predictions are.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;
use std::path::Path;
use std::sync::Mutex;

use fa_core::{Arch, Dtype, KernelSpec, Mask, Problem};
use fa_kernels::{Cache, Compiler, CompilerKind, Error, Headers, Report, Source, smem_bytes, tune};
use fa_planner::cost::{CostConstants, predict};
use fa_planner::plan::{BackwardOptions, Family, PlanOptions, Reason, explore};
use rayon::prelude::*;
use serde::Serialize;

use super::args::ValidateArgs;
use super::cases::{Action, Case, Extent, NamedSpec, of_spec};
use super::worker::{CaseResult, Status};
use crate::args::HeadDim;
use crate::cuda::flops;
use crate::failure::Verdict;
use crate::output;
use crate::progress::Steps;
use crate::record::{self, Provenance};

/// Candidates that miss the register limit by more than this share are not compiled: the compiler cannot help them.
const NEAR_MISS: f64 = 0.15;

/// Keys and queries of the measured problems; with them, 16,384 tokens and a width of 2,048.
const SEQLEN: usize = 8192;

/// Lines of a kind that a text lists.
const MOST_LINES: usize = 12;

/// A configuration for a problem.
#[derive(Clone, Debug)]
pub struct Config {
    /// What it is measured on.
    pub problem: Problem,
    /// The kernel.
    pub spec: KernelSpec,
    planned: Planned,
}

#[derive(Clone, Copy, Debug)]
struct Planned {
    fits: bool,
    registers: u32,
    limit: u32,
    tflops: f64,
}

/// What became of a configuration.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Head dims and mask of the problem.
    pub problem: String,
    /// The kernel.
    pub kernel: String,
    /// Whether the planner says that it fits.
    pub fits: bool,
    /// Registers that the planner predicts for a computing thread, and what one may have.
    pub registers_planned: u32,
    /// See above.
    pub register_limit: u32,
    /// Registers at launch, as compiled; setmaxnreg shares them out anew.
    pub registers: Option<u32>,
    /// Bytes spilled, stores and loads.
    pub spills: Option<u32>,
    /// What else the compiler says against it.
    pub fault: Option<String>,
    /// Bytes of shared memory: the unit asserts that plan and kernel agree.
    pub smem: u32,
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

/// Every configuration for the problems of `head_dims`.
pub fn configs(
    head_dims: &[HeadDim],
    backward: bool,
    family: Family,
    arch: Arch,
) -> anyhow::Result<Vec<Config>> {
    let backward = backward.then(BackwardOptions::default);
    let options = PlanOptions { family: Some(family), backward, ..PlanOptions::default() };
    let mut configs = Vec::new();
    for &HeadDim { qk, v } in head_dims {
        for mask in [Mask::FULL, Mask::CAUSAL] {
            let heads = (2048 / qk).max(1);
            let square = Problem::square(16_384 / SEQLEN, SEQLEN, heads, qk, mask, Dtype::Bf16);
            let problem = Problem { head_dim_v: v, ..square };
            let set = explore(&problem, arch, &options)?;
            configs.extend(set.plans.into_iter().map(|plan| Config {
                problem,
                spec: plan.spec,
                planned: Planned {
                    fits: true,
                    registers: plan.regs.total,
                    limit: plan.regs.limit,
                    tflops: plan.cost.tflops,
                },
            }));
            for miss in set.rejected {
                let (Reason::Registers { need, have } | Reason::Spills { need, have }) = miss.reason else {
                    continue;
                };
                let fits_otherwise = smem_bytes(&miss.spec) <= arch.limits().smem_per_block;
                let near = f64::from(need) <= (1.0 + NEAR_MISS) * f64::from(have);
                if near && fits_otherwise {
                    let constants = CostConstants::of(arch);
                    let tflops = predict(&problem, &miss.spec, arch, &constants).tflops;
                    let planned = Planned { fits: false, registers: need, limit: have, tflops };
                    configs.push(Config { problem, spec: miss.spec, planned });
                }
            }
        }
    }
    Ok(configs)
}

impl Config {
    /// `hd128 causal`.
    fn problem_name(&self) -> String {
        let Problem { head_dim, head_dim_v, mask, .. } = self.problem;
        let dims =
            if head_dim == head_dim_v { head_dim.to_string() } else { format!("{head_dim}-{head_dim_v}") };
        format!("hd{dims} {mask}")
    }

    /// The numerics and the measurement.
    fn cases(&self) -> Vec<Case> {
        let name = self.spec.to_string();
        let mut cases = of_spec("configs", &name, &self.spec, Extent::Quick);
        let kernel = Some(NamedSpec { name, spec: self.spec.clone() });
        let backward = tune::backward(&self.spec);
        let measured =
            Case { action: Action::Measure, kernel, ..super::cases::case("configs", self.problem) };
        cases.push(Case { backward, ..measured });
        cases
    }
}

/// The cases of all configurations.
pub fn cases(configs: &[Config]) -> Vec<Case> {
    configs.iter().flat_map(Config::cases).collect()
}

/// What compiling says about each configuration; `Err` holds why there is no report.
fn compile(configs: &[Config], arch: Arch) -> anyhow::Result<Vec<Result<Report, String>>> {
    let compiler = Compiler::find(CompilerKind::Nvrtc)?;
    let (cache, headers) = (Cache::open_default(), Headers::embedded());
    let steps = Mutex::new(Steps::new(configs.len()));
    let compile = |config: &Config| {
        if let Ok(mut steps) = steps.lock() {
            steps.begin(format!("compiling {}", config.spec));
            steps.advance();
        }
        let compiled = Source::new(&config.spec, arch, Some(smem_bytes(&config.spec)), &headers)
            .and_then(|source| cache.get(&compiler, &config.spec, &source));
        match compiled {
            Ok(compiled) => Ok(compiled.report.clone()),
            Err(Error::Refused { fault, log_file, .. }) => {
                let log = log_file.and_then(|path| std::fs::read_to_string(path).ok());
                log.as_deref().and_then(Report::parse).ok_or(fault)
            }
            Err(error) => Err(error.to_string().lines().next().unwrap_or_default().to_owned()),
        }
    };
    Ok(configs.par_iter().with_max_len(1).map(compile).collect())
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
    let configs = configs(&args.headdim, args.backward(), family, arch)?;
    let reports = compile(&configs, arch)?;
    // The worker passes over what it is told is done.
    let unclean = configs.iter().zip(&reports).filter(|(_, report)| !is_clean(report));
    let skipped = unclean.flat_map(|(config, _)| config.cases()).map(|case| CaseResult {
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
        write_record(&args.results, &kernels, &record, &results)?;
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
    let cases = config.cases();
    let found: Vec<&CaseResult> =
        cases.iter().filter_map(|case| results.get(case.name().as_str()).copied()).collect();
    let run: Vec<&CaseResult> = found.into_iter().filter(|result| result.status != Status::Skipped).collect();
    let right = (!run.is_empty()).then(|| run.iter().all(|result| result.status == Status::Passed));
    let ms = run.iter().find_map(|result| result.ms).filter(|_| right == Some(true));
    let spills = |report: &Report| report.spill_stores + report.spill_loads;
    Row {
        problem: config.problem_name(),
        kernel: config.spec.to_string(),
        fits: config.planned.fits,
        registers_planned: config.planned.registers,
        register_limit: config.planned.limit,
        registers: report.as_ref().ok().map(|report| report.registers),
        spills: report.as_ref().ok().map(spills),
        fault: match report {
            Ok(report) => report.fault().map(|fault| fault.to_string()),
            Err(reason) => Some(reason.clone()),
        },
        smem: smem_bytes(&config.spec),
        right,
        tflops_predicted: config.planned.tflops,
        tflops: ms.map(|ms| flops(&config.problem, tune::backward(&config.spec).is_some()) / ms / 1e9),
    }
}

fn summaries(rows: &[Row]) -> Vec<Summary> {
    let mut seen = HashSet::new();
    let problems: Vec<&String> =
        rows.iter().map(|row| &row.problem).filter(|problem| seen.insert(*problem)).collect();
    problems.into_iter().map(|problem| summary(problem, rows)).collect()
}

fn summary(problem: &str, rows: &[Row]) -> Summary {
    let own: Vec<&Row> = rows.iter().filter(|row| row.problem == problem).collect();
    let clean = |row: &&&Row| row.fault.is_none();
    let fit: Vec<&Row> = own.iter().filter(|row| row.fits).copied().collect();
    let measured: Vec<(f64, f64)> =
        fit.iter().filter_map(|row| Some((row.tflops_predicted, row.tflops?))).collect();
    let rate = |row: &&Row| Some((row.kernel.clone(), row.tflops?));
    Summary {
        problem: problem.to_owned(),
        fit: fit.len(),
        clean: fit.iter().filter(clean).count(),
        clean_though_rejected: own.iter().filter(|row| !row.fits).filter(clean).count(),
        right: own.iter().filter(|row| row.right == Some(true)).count(),
        wrong: own.iter().filter(|row| row.right == Some(false)).count(),
        rank_correlation: spearman(&measured),
        // Rows stand in the planner's order.
        first_choice: fit.iter().find(|row| row.fault.is_none()).and_then(rate),
        best: own.iter().filter_map(rate).max_by(|a, b| a.1.total_cmp(&b.1)),
    }
}

/// Spearman's rank correlation; ties share the mean of their ranks. `None` below three pairs or where all are equal.
pub fn spearman(pairs: &[(f64, f64)]) -> Option<f64> {
    if pairs.len() < 3 {
        return None;
    }
    let ranks = |values: Vec<f64>| -> Vec<f64> {
        let below = |x: f64| values.iter().filter(|y| **y < x).count() as f64;
        let equal = |x: f64| values.iter().filter(|y| **y == x).count() as f64;
        values.iter().map(|&x| below(x) + (equal(x) - 1.0) / 2.0).collect()
    };
    let a = ranks(pairs.iter().map(|pair| pair.0).collect());
    let b = ranks(pairs.iter().map(|pair| pair.1).collect());
    let mean = (pairs.len() - 1) as f64 / 2.0;
    let product = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| (x - mean) * (y - mean)).sum::<f64>();
    let norm = (product(&a, &a) * product(&b, &b)).sqrt();
    (norm > 0.0).then(|| product(&a, &b) / norm)
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
    let contradicted: Vec<&Row> = record.rows.iter().filter(|row| row.fits && row.fault.is_some()).collect();
    for row in contradicted.iter().take(MOST_LINES) {
        let _ = writeln!(
            text,
            "fits by plan ({} of {} registers), but {}: {}",
            row.registers_planned,
            row.register_limit,
            row.kernel,
            row.spills.filter(|spills| *spills > 0).map_or_else(
                || row.fault.as_deref().unwrap_or_default().chars().take(60).collect(),
                |spills| format!("{spills} B of spills")
            )
        );
    }
    if contradicted.len() > MOST_LINES {
        let _ = writeln!(text, "and {} more; --json and --record list all", contradicted.len() - MOST_LINES);
    }
    text
}

fn write_record(results: &Path, kernels: &str, record: &Record, cases: &[CaseResult]) -> anyhow::Result<()> {
    let name = format!("{kernels}-{}", record.provenance.gpu_slug());
    let json = record::write(results, "configs", &format!("{name}.json"), &output::json_text(record)?)?;
    let page = record::write(results, "configs", &format!("{name}.md"), &markdown(record, cases))?;
    eprintln!("wrote {} and {}", json.display(), page.display());
    Ok(())
}

fn markdown(record: &Record, cases: &[CaseResult]) -> String {
    let Provenance { command, commit, date, device, compiler, .. } = &record.provenance;
    let mut text = format!(
        "# Every {} configuration: predicted and measured\n\n`{command}`, commit {commit}, {date}\n\n{} ({} SMs), driver {}, \
         CUDA {}, {compiler}\n\nbf16, batch x seqlen 16,384, seqlen {}, heads x head dim 2,048. Rates in TFLOP/s by CUDA events. \
         A configuration is measured when it compiles without spills and forbidden warnings; \"clean though rejected\" \
         are those that the planner's register model rejects by at most {:.0} % and the compiler builds cleanly.\n\n",
        device.arch,
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
        let own = record.rows.iter().filter(|row| row.problem == summary.problem);
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
                row.kernel.clone(),
                if row.fits { "fits" } else { "rejected" }.to_owned(),
                format!("{} of {}", row.registers_planned, row.register_limit),
                row.spills.map_or("-".to_owned(), |spills| spills.to_string()),
                row.smem.to_string(),
                format!("{:.0}", row.tflops_predicted),
                match (row.tflops, row.right, &row.fault) {
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

    #[test]
    fn rank_correlation_is_one_for_any_rising_curve() {
        let rising: Vec<(f64, f64)> = (0..10).map(|i| (f64::from(i), f64::from(i * i))).collect();
        assert_eq!(spearman(&rising), Some(1.0));
        let falling: Vec<(f64, f64)> = rising.iter().map(|&(a, b)| (a, -b)).collect();
        assert_eq!(spearman(&falling), Some(-1.0));
        assert_eq!(spearman(&[(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]), None);
        // Hand-computed with ties: ranks (0, 1.5, 1.5, 3) and (0, 1, 2, 3).
        let tied = spearman(&[(1.0, 1.0), (2.0, 2.0), (2.0, 3.0), (3.0, 4.0)]).unwrap();
        assert!((tied - 4.5 / (4.5f64 * 5.0).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn configurations_have_unique_names_and_near_misses_among_them() {
        let found = configs(&[HeadDim { qk: 128, v: 128 }], false, Family::Sm90, Arch::Sm90).unwrap();
        assert!(found.iter().any(|config| !config.planned.fits));
        assert!(found.iter().filter(|config| config.planned.fits).count() > 20);
        let mut names = HashSet::new();
        assert!(cases(&found).iter().all(|case| names.insert(case.name())));
    }
}
