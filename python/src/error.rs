//! The library's errors as Python's exceptions.

use fa_attn::Error;
use fa_core::{ProblemError, Unserved};
use fa_cpu::CpuError;
use fa_planner::plan::PlanError;
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

create_exception!(fa_attn, InputError, PyValueError, "Arrays or options that contradict each other.");
create_exception!(
    fa_attn,
    UnsupportedError,
    PyValueError,
    "Something that no kernel computes; the message says what would work."
);
create_exception!(fa_attn, DeviceError, PyRuntimeError, "The GPU, its driver or its compiler refuses.");

/// The class `InputTypeError`, an `InputError` that is a `TypeError` as well.
pub(crate) fn input_type_error(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = CLASS.get_or_try_init(py, || {
        let bases = (py.get_type::<InputError>(), py.get_type::<PyTypeError>());
        let members = PyDict::new(py);
        members.set_item("__module__", "fa_attn")?;
        members.set_item("__doc__", "A value of a type that its argument does not take.")?;
        let class = py.get_type::<PyType>().call1(("InputTypeError", bases, members))?;
        Ok::<_, PyErr>(class.cast_into::<PyType>()?.unbind())
    })?;
    Ok(class.bind(py))
}

/// An `InputTypeError`.
pub(crate) fn of_another_type(py: Python<'_>, message: String) -> PyErr {
    match input_type_error(py) {
        Ok(class) => PyErr::from_type(class.clone(), message),
        Err(error) => error,
    }
}

/// The exception of an error, with its message.
pub(crate) fn raised(error: Error) -> PyErr {
    use fa_kernels::Error as Kernels;
    let mut text = error.to_string();
    if matches!(error, Error::Cpu(_) | Error::Kernels(Kernels::Append(_))) {
        text = as_arguments(&text);
    }
    match error {
        Error::Plan(PlanError::Unserved(Unserved::Scale { .. } | Unserved::Softcap { .. })) => {
            InputError::new_err(text)
        }
        Error::Plan(_)
        | Error::Problem(ProblemError::Types(_))
        | Error::Cpu(CpuError::LatentBackward | CpuError::PagedBackward)
        | Error::Isa { .. }
        | Error::Kernels(
            Kernels::Mismatch { .. }
            | Kernels::NoCode { .. }
            | Kernels::Page { .. }
            | Kernels::TooLong { .. },
        ) => UnsupportedError::new_err(text),
        Error::Kernels(
            Kernels::Problem(_)
            | Kernels::Division { .. }
            | Kernels::Stride { .. }
            | Kernels::Address { .. }
            | Kernels::TooShort { .. }
            | Kernels::Scale { .. }
            | Kernels::Softcap { .. }
            | Kernels::Append(_)
            | Kernels::Merge(_)
            | Kernels::Parts { .. }
            | Kernels::ProgramArray { .. }
            | Kernels::GradientExtent { .. }
            | Kernels::MissingExtra { .. }
            | Kernels::UnusedExtra { .. }
            | Kernels::SameMemory { .. },
        )
        | Error::Problem(_)
        | Error::Cpu(_)
        | Error::Length { .. }
        | Error::Memory { .. }
        | Error::Shape { .. }
        | Error::Dtype { .. }
        | Error::Pass { .. }
        | Error::BindOption { .. }
        | Error::TuningOption { .. } => InputError::new_err(text),
        Error::Kernels(_)
        | Error::Captured
        | Error::NoneAhead { .. }
        | Error::Threads { .. }
        | Error::NothingToMerge
        | Error::NothingToTune { .. }
        | Error::NoTunedTable
        | Error::TuningBudget { .. }
        | Error::TuningFailed { .. }
        | Error::TuningMemory { .. }
        | Error::BadTuned { .. }
        | Error::Read { .. }
        | Error::Write(_) => DeviceError::new_err(text),
    }
}

/// A message in which arguments have their Python names.
fn as_arguments(text: &str) -> String {
    const NAMES: [(&str, &str); 6] = [
        ("seqused_k", "seqused_k (cache_seqlens)"),
        ("cu_new", "cu_seqlens_k_new"),
        ("the problem's bound", "max_seqlen"),
        ("rotary.table", "the type of rotary_cos and rotary_sin"),
        ("rotary.dim", "twice the columns of rotary_cos"),
        // It has no name in Python.
        (" (the reference takes any)", ""),
    ];
    let mut text = text.to_owned();
    for (name, argument) in NAMES {
        text = text.replace(name, argument);
    }
    text
}
