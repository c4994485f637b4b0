//! The bits of the probabilities that dropout keeps, where the array of them lies.

use fa_core::Kept;
use fa_kernels::RawKept;
use pyo3::prelude::*;

use crate::devices;
use crate::dlpack::{Place, Type, View, current_stream, elsewhere};
use crate::error::InputError;
use crate::given::words;
use crate::slices::slice_mut;

/// Writes the bits `(sequences, heads, queries, words)` of 32 keys a word, int32: those of the `numbers`
/// seed, offset and threshold, or of the `state` of these three, int64 on the bits' GPU.
#[pyfunction]
#[pyo3(signature = (bits, state, numbers, stream=None))]
pub(crate) fn dropout_bits<'py>(
    py: Python<'py>,
    bits: &Bound<'py, PyAny>,
    state: Option<&Bound<'py, PyAny>>,
    numbers: Option<(u64, u64, u8)>,
    stream: Option<u64>,
) -> PyResult<()> {
    let to = words("bits", bits, stream, Type::I32)?;
    let &[sequences, heads, queries, words] = to.shape() else {
        let message = format!("bits has the shape {:?}: it must have four axes", to.shape());
        return Err(InputError::new_err(message));
    };
    if !to.is_contiguous() {
        return Err(InputError::new_err("bits must be contiguous"));
    }
    let kept = numbers.map(|(seed, offset, threshold)| Kept { seed, offset, threshold });
    match (to.place, kept, state) {
        (Place::Cpu, Some(kept), None) => {
            let to = slice_mut::<u32>("bits", &to)?;
            py.detach(|| kept.fill(queries, words, to));
            Ok(())
        }
        (Place::Cuda(ordinal), kept, state) if kept.is_some() != state.is_some() => {
            let _current = devices::Current::keep();
            let state = state.map(|state| View::of("state", state, stream)).transpose()?;
            let from = match (kept, &state) {
                (Some(kept), _) => RawKept::Value(kept),
                (None, Some(state)) if state.place != to.place => return Err(elsewhere("state", to.place)),
                (None, Some(state)) if state.elements() == 3 && state.element_bytes() == 8 => {
                    RawKept::At(state.address())
                }
                (None, _) => return Err(InputError::new_err("state must be three int64")),
            };
            let stream = match stream {
                Some(stream) => stream,
                None => current_stream(bits, ordinal)?.unwrap_or(0),
            };
            let counts = [sequences * heads, queries, words];
            devices::device(ordinal)?.dropout(py, counts, to.address(), from, stream)
        }
        (Place::Cpu | Place::Cuda(_), ..) => {
            Err(InputError::new_err("give numbers, or, of bits on a GPU, a state"))
        }
    }
}
