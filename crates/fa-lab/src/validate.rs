//! Validates the GPU's results: the cases run in a worker process and are compared with the CPU oracle.

pub mod configs;
mod event;
mod options;
pub mod sanitize;
mod select;
mod supervise;
pub(crate) mod worker;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fa_core::Family;
use serde::{Deserialize, Serialize};

use crate::device;
use crate::error::{Error, Result};
use crate::log::{self, Log};
use crate::progress::Progress;
use crate::record::Provenance;
use crate::worker::Program;

pub use event::{CaseResult, PassedOver, Status};
pub(crate) use options::Job;
pub use options::{Cases, Kind, Options, Resume};
use supervise::Limits;

/// The result of a validation.
#[derive(Debug, Serialize)]
pub struct Report {
    /// `validate` or `soak`.
    pub kind: &'static str,
    /// Whether no case failed.
    pub passed: bool,
    /// The machine, the program and the compiler.
    #[serde(flatten)]
    pub provenance: Provenance,
    /// `sm80` or `sm90`: the kernels validated.
    pub family: String,
    /// Seconds that it took.
    pub seconds: f64,
    /// The cases by kind.
    pub groups: Vec<Group>,
    /// Cases that are wrong, hang or crash.
    pub failed: Vec<CaseResult>,
    /// Cases that could not be tried here.
    pub skipped: Vec<CaseResult>,
    /// Kernels that the planner ranks above those that ran but that do not compile cleanly, with the number
    /// of cases.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub passed_over: Vec<(PassedOver, usize)>,
}

/// A group of cases.
#[derive(Debug, Serialize)]
pub struct Group {
    /// Their group: the first part of their names.
    pub group: String,
    /// How many there are.
    pub cases: usize,
    /// How many are right.
    pub passed: usize,
    /// How many are wrong, hang or crash.
    pub failed: usize,
    /// How many could not be tried here.
    pub skipped: usize,
    /// Kernels that ran.
    pub kernels: usize,
    /// The largest error as a share of its tolerance.
    pub worst: f64,
}

/// Runs the cases that `options` name and judges them.
///
/// # Errors
/// Without a driver, a GPU or a compiler, when no case is chosen, and when workers are lost again and again.
pub fn run(options: &Options, program: &Program, progress: &mut Progress<'_>) -> Result<Report> {
    // Fails at once without a GPU; the context is released before a worker opens its own.
    let arch = device::open()?.arch();
    let family = options.family.unwrap_or(Family::native(arch));
    let start = Instant::now();
    let deadline = options.soak_time().map(|time| start + time);
    let watchdog = Duration::from_secs(u64::from(options.watchdog));
    let job = Job { options: Options { family: Some(family), ..options.clone() }, finished: Vec::new() };
    let limits = Limits { watchdog, deadline, until: None };
    let (results, _) = supervise::run(program, job, limits, Vec::new(), &mut |_| Ok(()), progress)?;
    if results.is_empty() {
        let filter = options.filter.as_deref().unwrap_or_default();
        let groups = match options.groups.as_slice() {
            [] => String::new(),
            groups => format!(" of the groups {} of this pass", groups.join(", ")),
        };
        let kind = options.kind.text();
        return Err(Error::Request(format!("no case{kind}{groups} has '{filter}' in its name")));
    }
    report(options, family, results, start.elapsed())
}

/// A line of a state file: a case that has ended, and what it is of.
#[derive(Serialize, Deserialize)]
struct Ended {
    of: String,
    result: CaseResult,
}

/// Runs the cases that `options` name up to the time of `resume`, without those that its state has: all
/// results so far, and whether no case is left.
///
/// # Errors
/// As [`run`], and a state that cannot be read or written.
pub fn run_cases(
    options: &Options,
    program: &Program,
    resume: &Resume,
    progress: &mut Progress<'_>,
) -> Result<(Vec<CaseResult>, bool)> {
    let Resume { until, state, of } = resume;
    let lines: Vec<Ended> = match state {
        Some(path) => log::read(path)?.results,
        None => Vec::new(),
    };
    let done = lines.into_iter().filter(|line| line.of == *of).map(|line| line.result);
    // What failed is tried again, and what ended twice counts once.
    let good = done.filter(|result| result.status != Status::Failed);
    let done =
        good.map(|result| (result.name.clone(), result)).collect::<BTreeMap<_, _>>().into_values().collect();
    let mut log = state.as_deref().map(Log::open).transpose()?;
    let mut keep = |result: &CaseResult| match &mut log {
        Some(log) => log.add(&[Ended { of: of.clone(), result: result.clone() }]),
        None => Ok(()),
    };
    let watchdog = Duration::from_secs(u64::from(options.watchdog));
    let limits = Limits { watchdog, deadline: None, until: *until };
    let job = Job { options: options.clone(), finished: Vec::new() };
    supervise::run(program, job, limits, done, &mut keep, progress)
}

fn report(options: &Options, family: Family, results: Vec<CaseResult>, time: Duration) -> Result<Report> {
    let passed = results.iter().all(|result| result.status != Status::Failed);
    let mut report = Report {
        kind: if options.soak_time().is_some() { "soak" } else { "validate" },
        passed,
        provenance: Provenance::new(&device::open()?)?,
        family: family.to_string(),
        seconds: time.as_secs_f64(),
        groups: groups(&results),
        failed: Vec::new(),
        skipped: Vec::new(),
        passed_over: passed_over(&results),
    };
    for result in results {
        match result.status {
            Status::Passed => {}
            Status::Failed => report.failed.push(result),
            Status::Skipped => report.skipped.push(result),
        }
    }
    Ok(report)
}

fn passed_over(results: &[CaseResult]) -> Vec<(PassedOver, usize)> {
    let mut counts: BTreeMap<&PassedOver, usize> = BTreeMap::new();
    for kernel in results.iter().flat_map(|result| &result.passed_over) {
        *counts.entry(kernel).or_default() += 1;
    }
    counts.into_iter().map(|(kernel, cases)| (kernel.clone(), cases)).collect()
}

fn groups(results: &[CaseResult]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let mut kernels: Vec<std::collections::HashSet<&str>> = Vec::new();
    let mut sorted: Vec<&CaseResult> = results.iter().collect();
    sorted.sort_by(|a, b| a.name.cmp(&b.name));
    for result in sorted {
        let name = result.name.split('/').next().unwrap_or_default();
        if groups.last().is_none_or(|group| group.group != name) {
            let group = name.to_owned();
            groups.push(Group { group, cases: 0, passed: 0, failed: 0, skipped: 0, kernels: 0, worst: 0.0 });
            kernels.push(Default::default());
        }
        let (Some(group), Some(kernels)) = (groups.last_mut(), kernels.last_mut()) else { continue };
        group.cases += 1;
        match result.status {
            Status::Passed => group.passed += 1,
            Status::Failed => group.failed += 1,
            Status::Skipped => group.skipped += 1,
        }
        if !result.kernel.is_empty() {
            kernels.insert(&result.kernel);
        }
        group.kernels = kernels.len();
        group.worst = group.worst.max(result.ratio);
    }
    groups
}
