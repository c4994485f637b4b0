//! What works on this machine, for `python -m fa_attn doctor`.

use pyo3::prelude::*;

use crate::error::InputError;
use crate::{devices, threads};

/// The checks of the library as a JSON list.
#[pyfunction]
pub(crate) fn doctor(py: Python<'_>) -> PyResult<String> {
    let _current = devices::Current::keep();
    threads::detached(py, || {
        let checks = fa_attn::doctor::checks();
        serde_json::to_string(&checks).map_err(|error| InputError::new_err(error.to_string()))
    })?
}
