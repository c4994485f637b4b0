//! The quantisers of K and V for arrays in the CPU's memory.

use fa_attn::Dtype;
use fa_attn::quantize::Codes;
use pyo3::prelude::*;

use crate::dlpack::{Place, Type, View, elsewhere};
use crate::error::InputError;
use crate::given::words;
use crate::slices::{floats, slice_mut};

/// Writes the codes nearest to `values` (float32, contiguous) to `codes`, bytes. `kind` is e4m3, int8,
/// e5m2, or int4, of which a byte holds two.
#[pyfunction]
pub(crate) fn encode(values: &Bound<'_, PyAny>, codes: &Bound<'_, PyAny>, kind: &str) -> PyResult<()> {
    let kind = kind.parse::<Dtype>().ok().and_then(Codes::of);
    let kind = kind.ok_or_else(|| InputError::new_err("the codes must be e4m3, int8, int4 or e5m2"))?;
    let values = words("x", values, None, Type::F32)?;
    let codes = View::of("codes", codes, None)?;
    for (name, view) in [("x", &values), ("codes", &codes)] {
        if view.place != Place::Cpu {
            return Err(elsewhere(name, Place::Cpu));
        }
    }
    let per_byte = kind.per_byte();
    let fits = codes.element_bytes() == 1 && codes.elements() * per_byte == values.elements();
    if !fits || !codes.is_contiguous() {
        let need = format!("codes must be a byte for each {per_byte} of the elements of x, end to end");
        return Err(InputError::new_err(need));
    }
    let to = slice_mut::<u8>("codes", &codes)?;
    to.iter_mut().zip(kind.pack(floats("x", &values)?, 1.0)).for_each(|(to, byte)| *to = byte);
    Ok(())
}
