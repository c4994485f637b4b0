//! Elements of arrays in the CPU's memory.
#![allow(unsafe_code)]

use pyo3::prelude::*;

use crate::dlpack::{Type, View};
use crate::error::InputError;

pub(crate) fn floats<'a>(name: &str, view: &'a View<'_>) -> PyResult<&'a [f32]> {
    check_floats(name, view)?;
    // SAFETY: the array holds that many f32 end to end.
    Ok(unsafe { elements(view.data.cast(), view.elements()) })
}

// The memory is another library's: a view borrows the object, not what is in it.
#[allow(clippy::mut_from_ref)]
pub(crate) fn floats_mut<'a>(name: &str, view: &'a View<'_>) -> PyResult<&'a mut [f32]> {
    check_floats(name, view)?;
    slice_mut(name, view)
}

fn check_floats(name: &str, view: &View<'_>) -> PyResult<()> {
    if view.dtype == Type::F32 && view.is_contiguous() {
        return Ok(());
    }
    Err(InputError::new_err(format!("{name} must be float32 and contiguous")))
}

// The memory is another library's: a view borrows the object, not what is in it.
#[allow(clippy::mut_from_ref)]
pub(crate) fn slice_mut<'a, T>(name: &str, view: &'a View<'_>) -> PyResult<&'a mut [T]> {
    slice_mut_of(name, view, view.elements())
}

// The memory is another library's: a view borrows the object, not what is in it.
#[allow(clippy::mut_from_ref)]
pub(crate) fn slice_mut_of<'a, T>(name: &str, view: &'a View<'_>, len: usize) -> PyResult<&'a mut [T]> {
    if view.read_only {
        return Err(InputError::new_err(format!("{name} is read-only, and the call writes it")));
    }
    if len == 0 || view.data.is_null() {
        return Ok(&mut []);
    }
    // SAFETY: the array has that many elements; the package hands in arrays that it made for the call, or a
    // cache that the caller gave to be written.
    Ok(unsafe { std::slice::from_raw_parts_mut(view.data.cast::<T>(), len) })
}

/// # Safety
/// `data` points at `len` elements, or is null.
pub(crate) unsafe fn elements<'a, T>(data: *const T, len: usize) -> &'a [T] {
    if len == 0 || data.is_null() {
        return &[];
    }
    // SAFETY: as the caller says.
    unsafe { std::slice::from_raw_parts(data, len) }
}
