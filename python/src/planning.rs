//! Problems and kernels as data: what the package gives as plain dicts.

use fa_attn::{Pass, Problem};
use pyo3::prelude::*;

use crate::calls::report_of;
use crate::dlpack::Place;
use crate::error::InputError;

/// The package's version.
#[pyfunction]
pub fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// A problem from its JSON, checked.
pub fn problem_of(json: &str) -> PyResult<Problem> {
    let problem: Problem = serde_json::from_str(json)
        .map_err(|error| InputError::new_err(format!("this is no problem: {error}")))?;
    problem.check().map_err(|error| InputError::new_err(error.to_string()))?;
    Ok(problem)
}

/// A problem, checked, with all its fields, as JSON.
#[pyfunction]
pub fn problem(json: &str) -> PyResult<String> {
    serde_json::to_string(&problem_of(json)?).map_err(|error| InputError::new_err(error.to_string()))
}

/// Binds a pass of a problem on the CPU (`device` None) or a GPU, and says what runs it, as JSON.
#[pyfunction]
#[pyo3(signature = (problem, backward, deterministic, device=None))]
pub fn bind(
    py: Python<'_>,
    problem: &str,
    backward: bool,
    deterministic: bool,
    device: Option<i32>,
) -> PyResult<String> {
    let pass = if backward { Pass::Backward { deterministic } } else { Pass::Forward };
    report_of(py, &problem_of(problem)?, pass, device.map_or(Place::Cpu, Place::Cuda))
}
