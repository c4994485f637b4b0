//! The library's errors as Python's exceptions.

use fa_attn::Error;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::{PyErr, create_exception};

create_exception!(fa_attn, InputError, PyValueError, "Arrays or options that contradict each other.");
create_exception!(
    fa_attn,
    UnsupportedError,
    PyValueError,
    "Something that no kernel computes; the message says what would work."
);
create_exception!(fa_attn, DeviceError, PyRuntimeError, "The GPU, its driver or its compiler refuses.");

/// The exception of an error, with its message.
pub fn raised(error: Error) -> PyErr {
    use fa_kernels::Error as Kernels;
    let text = error.to_string();
    match error {
        Error::Plan(_)
        | Error::Isa { .. }
        | Error::Kernels(
            Kernels::Mismatch { .. }
            | Kernels::NoCode { .. }
            | Kernels::Page { .. }
            | Kernels::TooLong { .. },
        ) => UnsupportedError::new_err(text),
        Error::Kernels(
            Kernels::Problem(_)
            | Kernels::Stride { .. }
            | Kernels::Address { .. }
            | Kernels::TooShort { .. }
            | Kernels::Scale { .. }
            | Kernels::Softcap { .. }
            | Kernels::Append(_)
            | Kernels::Merge(_)
            | Kernels::Parts { .. }
            | Kernels::MissingExtra { .. }
            | Kernels::UnusedExtra { .. }
            | Kernels::SameMemory { .. },
        )
        | Error::Problem(_)
        | Error::Cpu(_)
        | Error::Length { .. }
        | Error::Shape { .. }
        | Error::Dtype { .. }
        | Error::Pass { .. }
        | Error::TuningOption { .. } => InputError::new_err(text),
        _ => DeviceError::new_err(text),
    }
}
