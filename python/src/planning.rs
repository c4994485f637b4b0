//! Problems and kernels as data, which the package returns as plain dicts.

use std::time::Duration;

use fa_attn::{Division, Pass, Problem, Tried, Tuning, TuningOutcome};
use fa_core::{Arch, ArchLimits, Board, KernelSpec};
use fa_planner::report::{PlanFamily, Planned, ReportError};
use pyo3::prelude::*;
use serde::Serialize;

use crate::calls::report_of;
use crate::dlpack::Place;
use crate::error::{InputError, UnsupportedError};
use crate::given::arguments;
use crate::{devices, threads};

/// The package's version.
#[pyfunction]
pub(crate) fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// A problem from its JSON, checked.
pub(crate) fn problem_of(json: &str) -> PyResult<Problem> {
    let problem: Problem = serde_json::from_str(json)
        .map_err(|error| InputError::new_err(format!("this is not a problem: {error}")))?;
    problem.check().map_err(|error| InputError::new_err(error.to_string()))?;
    Ok(problem)
}

/// A problem, checked, with all its fields, as JSON.
#[pyfunction]
pub(crate) fn problem(json: &str) -> PyResult<String> {
    serde_json::to_string(&problem_of(json)?).map_err(|error| InputError::new_err(error.to_string()))
}

/// The name of a kernel's spec, from its JSON.
#[pyfunction]
pub(crate) fn spec_name(json: &str) -> PyResult<String> {
    let spec: KernelSpec = serde_json::from_str(json)
        .map_err(|error| InputError::new_err(format!("this is not a spec: {error}")))?;
    Ok(spec.to_string())
}

/// The names of the extras that calls of a problem take, those that every function takes.
#[pyfunction]
pub(crate) fn needs(json: &str) -> PyResult<Vec<&'static str>> {
    let problem = problem_of(json)?;
    let needs = arguments().filter_map(|extra| extra.need(&problem, Pass::Forward));
    Ok(needs.map(|need| need.name).collect())
}

/// Binds a pass of a problem on the CPU (`device` None) or a GPU, and says what runs it, as JSON.
#[pyfunction]
#[pyo3(signature = (problem, backward, deterministic, device=None))]
pub(crate) fn bind(
    py: Python<'_>,
    problem: &str,
    backward: bool,
    deterministic: bool,
    device: Option<i32>,
) -> PyResult<String> {
    let pass = if backward { Pass::Backward { deterministic } } else { Pass::Forward };
    report_of(
        py,
        &problem_of(problem)?,
        pass,
        (Division::PLANNED, deterministic),
        device.map_or(Place::Cpu, Place::Cuda),
    )
}

/// Everything that is tried for a problem on an architecture, as `fa plan --json` prints it; at most `limit`
/// plans of each pass.
#[pyfunction]
#[pyo3(signature = (problem, arch, family, forward, backward, deterministic, limit=None))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn plan(
    py: Python<'_>,
    problem: &str,
    arch: &str,
    family: Option<&str>,
    forward: bool,
    backward: bool,
    deterministic: bool,
    limit: Option<usize>,
) -> PyResult<String> {
    let asked = asked(problem, arch, family)?;
    let backward = backward.then_some(Pass::Backward { deterministic });
    threads::detached(py, || {
        let planned = explore(&asked, forward, backward)?;
        text(&planned.report(limit.unwrap_or(usize::MAX)))
    })?
}

/// Why the candidates that meet every condition of `query` fit or do not, as `fa plan --why --json` prints
/// it.
#[pyfunction]
#[pyo3(signature = (problem, query, arch, family, forward, backward, deterministic))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn explain(
    py: Python<'_>,
    problem: &str,
    query: &str,
    arch: &str,
    family: Option<&str>,
    forward: bool,
    backward: bool,
    deterministic: bool,
) -> PyResult<String> {
    let asked = asked(problem, arch, family)?;
    let backward = backward.then_some(Pass::Backward { deterministic });
    threads::detached(py, || text(&explore(&asked, forward, backward)?.why(query).map_err(refused)?))?
}

/// Switches tuning on, with `candidates` kernels and `budget` seconds for each problem and pass, or off.
#[pyfunction]
#[pyo3(signature = (candidates=None, budget=0.0))]
pub(crate) fn tune(py: Python<'_>, candidates: Option<usize>, budget: f64) -> PyResult<()> {
    let tuning = match candidates {
        None => Tuning::Off,
        Some(candidates) => {
            let budget = Duration::try_from_secs_f64(budget).map_err(|_| {
                InputError::new_err(format!("tune: budget is {budget} s, it must be above 0 s"))
            })?;
            Tuning::OnFirstUse { candidates, budget }
        }
    };
    devices::set_tuning(py, tuning)
}

/// Waits for the measurements; returns their outcomes as JSON.
#[pyfunction]
pub(crate) fn finish_tuning(py: Python<'_>) -> PyResult<String> {
    let outcomes = devices::finish_tuning(py);
    text(&outcomes.iter().map(outcome_of).collect::<Vec<_>>())
}

fn outcome_of(outcome: &TuningOutcome) -> serde_json::Value {
    let TuningOutcome { problem, pass, family, tried, winner, error } = outcome;
    let name = |spec: &KernelSpec| spec.to_string();
    let tried_of = |tried: &Tried| {
        let Tried { spec, ms, error } = tried;
        serde_json::json!({ "kernel": name(spec), "ms": ms, "error": error })
    };
    let tried: Vec<_> = tried.iter().map(tried_of).collect();
    let (winner, error) = (winner.as_ref().map(name), error.as_ref().map(ToString::to_string));
    serde_json::json!({
        "problem": problem,
        "pass": if pass.is_backward() { "backward" } else { "forward" },
        "deterministic": *pass == Pass::Backward { deterministic: true },
        "family": family,
        "tried": tried,
        "winner": winner,
        "error": error,
    })
}

/// A problem, the architecture that it is planned for with a board where one is named, and the family of
/// kernels.
type Asked = (Problem, (Arch, Option<ArchLimits>), Option<PlanFamily>);

fn asked(problem: &str, arch: &str, family: Option<&str>) -> PyResult<Asked> {
    let on = match arch.parse::<Board>() {
        Ok(board) => (board.arch, Some(board.limits)),
        Err(_) => {
            let arch = arch.parse().map_err(|error| InputError::new_err(format!("arch: {error}")))?;
            (arch, None)
        }
    };
    let family = match family {
        None => None,
        Some(name) => {
            let family = name.parse().map_err(|error| InputError::new_err(format!("family: {error}")))?;
            Some(PlanFamily::of(family))
        }
    };
    Ok((problem_of(problem)?, on, family))
}

fn explore((problem, on, family): &Asked, forward: bool, backward: Option<Pass>) -> PyResult<Planned> {
    Planned::explore(problem, *on, *family, forward, backward).map_err(refused)
}

fn refused(error: ReportError) -> PyErr {
    let message = error.to_string();
    match error {
        ReportError::Plan(_) | ReportError::Sm100Backward => UnsupportedError::new_err(message),
        ReportError::Sm100Why
        | ReportError::NoSpec
        | ReportError::Why(_)
        | ReportError::HeadDims(_)
        | ReportError::HeadDim(_)
        | ReportError::Search(_) => InputError::new_err(message),
    }
}

fn text(report: &impl Serialize) -> PyResult<String> {
    serde_json::to_string(report).map_err(|error| InputError::new_err(error.to_string()))
}
