//! The quantisers of K and V for arrays in the CPU's memory.

use fa_attn::Dtype;
use fa_attn::quantize::Codes;
use pyo3::prelude::*;

use crate::dlpack::{Place, Type, View, elsewhere};
use crate::error::InputError;
use crate::given::words;
use crate::slices::{floats, slice_mut};

/// Writes the codes nearest to `values` (float32, contiguous) to `codes`, bytes of as many elements. `kind`
/// is e4m3 or int8.
#[pyfunction]
pub(crate) fn encode(values: &Bound<'_, PyAny>, codes: &Bound<'_, PyAny>, kind: &str) -> PyResult<()> {
    let kind = kind.parse::<Dtype>().ok().and_then(Codes::of);
    let kind = kind.ok_or_else(|| InputError::new_err("the codes must be e4m3 or int8"))?;
    let values = words("x", values, None, Type::F32)?;
    let codes = View::of("codes", codes, None)?;
    for (name, view) in [("x", &values), ("codes", &codes)] {
        if view.place != Place::Cpu {
            return Err(elsewhere(name, Place::Cpu));
        }
    }
    if codes.element_bytes() != 1 || codes.elements() != values.elements() || !codes.is_contiguous() {
        return Err(InputError::new_err("codes must be as many bytes as x has elements, end to end"));
    }
    let to = slice_mut::<u8>("codes", &codes)?;
    to.iter_mut().zip(floats("x", &values)?).for_each(|(to, &value)| *to = kind.encode(value));
    Ok(())
}
