//! How an object's library lends an array: by the C exchange API of its type, or by a capsule.
#![allow(unsafe_code)]

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyDict, PyType};

use super::abi::{CUDA, Exchange};
use crate::error::{InputError, of_another_type};

const EXCHANGE: &std::ffi::CStr = c"dlpack_exchange_api";

/// The exchange table of the object's type; the first type that has one is remembered.
pub(super) fn exchange_of(object: &Bound<'_, PyAny>) -> PyResult<Option<&'static Exchange>> {
    static FIRST: PyOnceLock<(Py<PyType>, Table)> = PyOnceLock::new();
    let py = object.py();
    let of = object.get_type();
    if let Some((known, table)) = FIRST.get(py)
        && known.is(&of)
    {
        return Ok(Some(table.0));
    }
    let name = intern!(py, "__dlpack_c_exchange_api__");
    let Ok(capsule) = of.getattr(name) else { return Ok(None) };
    let Ok(capsule) = capsule.cast_into::<PyCapsule>() else { return Ok(None) };
    let pointer = capsule.pointer_checked(Some(EXCHANGE))?;
    // SAFETY: a capsule of that name points at a table that lives as long as the process.
    let table: &'static Exchange = unsafe { pointer.cast().as_ref() };
    if table.header.version.major != 1 || table.tensor_from_object.is_none() {
        return Ok(None);
    }
    // Subclasses such as torch's Parameter inherit the table of their base.
    let _ = FIRST.set(py, (of.unbind(), Table(table)));
    Ok(Some(table))
}

/// A table of functions that any thread may call.
#[derive(Clone, Copy)]
struct Table(&'static Exchange);

// SAFETY: the table is constant for the life of the process.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

/// The stream on which the object's library works now, where it says so.
pub(crate) fn current_stream(object: &Bound<'_, PyAny>, device: i32) -> PyResult<Option<u64>> {
    let Some(Exchange { current_stream: Some(ask), .. }) = exchange_of(object)? else { return Ok(None) };
    let mut stream = std::ptr::null_mut();
    // SAFETY: the argument points at a local.
    let status = unsafe { ask(CUDA, device, &mut stream) };
    if status != 0 {
        return Err(PyErr::take(object.py())
            .unwrap_or_else(|| InputError::new_err("the arrays' library names no current stream")));
    }
    Ok(Some(stream as u64))
}

/// The object's capsule, of version 1 where its library knows that.
pub(super) fn capsule_of<'py>(
    name: &str,
    object: &Bound<'py, PyAny>,
    stream: Option<u64>,
) -> PyResult<Bound<'py, PyCapsule>> {
    let py = object.py();
    let Ok(method) = object.getattr(intern!(py, "__dlpack__")) else {
        let of = object.get_type();
        let message = format!(
            "{name} is {}: it must be an array that speaks DLPack (numpy, torch, jax, cupy)",
            of.name()?
        );
        return Err(of_another_type(py, message));
    };
    let options = PyDict::new(py);
    if let Some(stream) = stream {
        // Of CUDA's streams 0 is ambiguous to DLPack: the default one is 1.
        options.set_item(intern!(py, "stream"), stream.max(1))?;
    }
    let plain = options.copy()?;
    options.set_item(intern!(py, "max_version"), (1, 0))?;
    let capsule = match method.call((), Some(&options)) {
        Err(error) if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) => {
            method.call((), Some(&plain))
        }
        capsule => capsule,
    };
    Ok(capsule.map_err(|error| unlent(name, object, error))?.cast_into::<PyCapsule>()?)
}

/// The words of 16 bits of a numpy array of ml_dtypes' bfloat16, for which numpy's capsules have no name.
pub(super) fn words_of_bfloat16<'py>(object: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    let py = object.py();
    let name = object.getattr(intern!(py, "dtype")).and_then(|of| of.getattr(intern!(py, "name"))).ok()?;
    if !name.eq(intern!(py, "bfloat16")).ok()? {
        return None;
    }
    object.call_method1(intern!(py, "view"), (intern!(py, "uint16"),)).ok()
}

/// The refusal of an array that its library does not lend: a byte order or a type that DLPack has no name
/// for, no memory (torch's meta tensors).
pub(super) fn unlent(name: &str, object: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    use pyo3::exceptions::{PyBufferError, PyRuntimeError};
    let py = object.py();
    if !error.is_instance_of::<PyBufferError>(py) && !error.is_instance_of::<PyRuntimeError>(py) {
        return error;
    }
    let of = object.getattr(intern!(py, "dtype")).map_or_else(|_| String::new(), |of| format!(" ({of})"));
    let text = error.value(py).to_string();
    let line = text.lines().next().unwrap_or_default().trim_end_matches('.');
    InputError::new_err(format!("{name}{of} cannot be lent: {line}; convert it"))
}
