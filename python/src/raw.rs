//! Arrays in a GPU's memory as the arguments of a launch.

use fa_core::Strides;
use fa_kernels::{RawExtras, RawTensor};
use pyo3::prelude::*;

use crate::dlpack::{Place, Type, View, elsewhere};
use crate::error::InputError;
use crate::given::Beside;
use crate::host::placement;

pub(crate) fn on_device(name: &str, view: &View<'_>, place: Place) -> PyResult<u64> {
    if view.place == place { Ok(view.address()) } else { Err(elsewhere(name, place)) }
}

pub(crate) fn raw(name: &str, view: &View<'_>, place: Place) -> PyResult<RawTensor> {
    let address = on_device(name, view, place)?;
    let Some((_, strides)) = placement(view) else {
        return Err(InputError::new_err(format!(
            "{name} has the shape {:?}: 3 or 4 axes are needed",
            view.shape()
        )));
    };
    // Of a single sequence the distance to the next is nobody's.
    let batch = match view.shape() {
        &[rows, _, _] => strides.seq.saturating_mul(i64::try_from(rows.max(1)).unwrap_or(i64::MAX)),
        _ => strides.batch,
    };
    Ok(RawTensor { address, strides: Strides { batch, ..strides } })
}

pub(crate) fn floats(name: &str, view: &View<'_>, place: Place) -> PyResult<u64> {
    if view.dtype != Type::F32 || !view.is_contiguous() {
        return Err(InputError::new_err(format!("{name} must be float32 and contiguous")));
    }
    on_device(name, view, place)
}

pub(crate) fn extras(beside: &Beside<'_>) -> RawExtras {
    let inputs = beside.extras.as_ref().map(|_, view| view.address(), |_, view| view.address());
    RawExtras { inputs, ..RawExtras::default() }
}
