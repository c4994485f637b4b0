//! Every configuration that the planner lists, compiled, validated and measured, to judge the planner's
//! predictions.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use fa_core::Family;
use fa_kernels::{Compiler, CompilerKind, Report};
use fa_planner::cost::rank_correlation;
use serde::Serialize;

use super::event::{CaseResult, Status};
use super::options::{Cases, Job, Options};
use super::supervise::{self, Limits};
use crate::configs::{self, Built, Config, SEQLEN};
use crate::device;
use crate::error::Result;
use crate::grid::{self, Action, Case, Extent, NamedSpec, of_spec};
use crate::progress::Progress;
use crate::record::Provenance;
use crate::shape::HeadDim;
use crate::worker::Program;

/// The results of a configuration.
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
    /// Configurations that narrowly exceed the planner's register limit, but compile cleanly.
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

/// The results of all configurations.
#[derive(Debug, Serialize)]
pub struct Record {
    /// `configs`.
    pub kind: &'static str,
    /// Whether none is wrong.
    pub passed: bool,
    /// The machine, the program and the compiler.
    #[serde(flatten)]
    pub provenance: Provenance,
    /// Queries and keys of the problems.
    pub seqlen: usize,
    /// By problem.
    pub summaries: Vec<Summary>,
    /// By configuration.
    pub rows: Vec<Row>,
    /// The family of the kernels.
    #[serde(skip)]
    pub family: Family,
    /// The results of the cases.
    #[serde(skip)]
    pub cases: Vec<CaseResult>,
}

/// The cases of a configuration: its numerics and its measurement.
fn cases_of(config: &Config) -> Vec<Case> {
    let name = config.spec.to_string();
    let mut cases = of_spec("configs", &name, &config.spec, Extent::Quick);
    let kernel = Some(NamedSpec { name, spec: config.spec.clone() });
    let measured = Case { action: Action::Measure, kernel, ..grid::case("configs", config.problem) };
    cases.push(Case { pass: config.spec.kernel.pass(), ..measured });
    cases
}

/// The cases of all configurations.
pub fn cases(configs: &[Config]) -> Vec<Case> {
    configs.iter().flat_map(cases_of).collect()
}

/// Compiles, validates and measures every configuration for `head_dims`.
///
/// # Errors
/// When there is no GPU or compiler, or workers are lost again and again.
pub fn run(
    options: &Options,
    head_dims: &[HeadDim],
    program: &Program,
    progress: &mut Progress<'_>,
) -> Result<Record> {
    let arch = device::open()?.arch();
    let family = options.family.unwrap_or(Family::native(arch));
    let configs = configs::list(head_dims, options.pass, family, arch)?;
    let reports = configs::compile(&configs, arch, &Compiler::find(CompilerKind::Nvrtc)?, progress);
    // The worker skips finished cases.
    let unclean = configs.iter().zip(&reports).filter(|(_, report)| !is_clean(report));
    let skipped = unclean.flat_map(|(config, _)| cases_of(config)).map(|case| CaseResult {
        name: case.name(),
        kernel: String::new(),
        status: Status::Skipped,
        ratio: 0.0,
        detail: "does not compile cleanly".to_owned(),
        ms: None,
        passed_over: Vec::new(),
    });
    let cases = Cases::Configs { head_dims: head_dims.to_vec() };
    let options = Options { family: Some(family), cases, ..options.clone() };
    let watchdog = Duration::from_secs(u64::from(options.watchdog));
    let job = Job { options, finished: Vec::new() };
    let limits = Limits { watchdog, deadline: None, until: None };
    let (cases, _) = supervise::run(program, job, limits, skipped.collect(), &mut |_| Ok(()), progress)?;
    let by_name: HashMap<&str, &CaseResult> =
        cases.iter().map(|result| (result.name.as_str(), result)).collect();
    let rows: Vec<Row> =
        configs.iter().zip(&reports).map(|(config, report)| row(config, report, &by_name)).collect();
    let summaries = summaries(&rows);
    let passed = rows.iter().all(|row| row.right != Some(false));
    let provenance = Provenance::new(&device::open()?)?;
    Ok(Record { kind: "configs", passed, provenance, seqlen: SEQLEN, summaries, rows, family, cases })
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
        // Rows are in the planner's order.
        first_choice: fit.iter().find(|row| row.built.fault.is_none()).and_then(rate),
        best: own.iter().filter_map(rate).max_by(|a, b| a.1.total_cmp(&b.1)),
    }
}

#[cfg(test)]
mod tests {
    use fa_core::{Arch, Pass};

    use super::*;

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
