//! Results over different keys of the same queries, merged where they lie.

use fa_attn::{Dtype, Element, bf16, f16};
use fa_core::Merge;
use fa_cpu::merge::{add_sink_to_row, merge_row};
use fa_cpu::{TensorMut, TensorRef};
use pyo3::prelude::*;

use crate::devices;
use crate::dlpack::{Place, Type, View, current_stream, elsewhere};
use crate::error::InputError;
use crate::given::{dtype_of, words};
use crate::host::{Merged, placement, tensor, tensor_mut};
use crate::slices::{floats, floats_mut};

/// Merges the parts `outs`, `(batch, seqlen, heads, head_dim)` each or packed, with their `lses` into `out`
/// and `lse`. Parts are of one type, the result may be of another.
#[pyfunction]
#[pyo3(signature = (outs, lses, out, lse, sinks=None, stream=None))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn merge<'py>(
    py: Python<'py>,
    outs: Vec<Bound<'py, PyAny>>,
    lses: Vec<Bound<'py, PyAny>>,
    out: &Bound<'py, PyAny>,
    lse: &Bound<'py, PyAny>,
    sinks: Option<&Bound<'py, PyAny>>,
    stream: Option<u64>,
) -> PyResult<()> {
    let f32s = |name: &str, object: &Bound<'py, PyAny>| words(name, object, stream, Type::F32);
    let arrays = Merged {
        outs: outs.iter().map(|part| View::of("outs", part, stream)).collect::<PyResult<_>>()?,
        lses: lses.iter().map(|part| f32s("lses", part)).collect::<PyResult<_>>()?,
        out: View::of("out", out, stream)?,
        lse: f32s("softmax_lse", lse)?,
        sinks: sinks.map(|sinks| f32s("sinks", sinks)).transpose()?,
    };
    let problem = arrays.problem()?;
    match arrays.out.place {
        Place::Cpu => arrays.on_host(py, &problem),
        Place::Cuda(ordinal) => {
            let _current = devices::Current::keep();
            let stream = match stream {
                Some(stream) => stream,
                None => current_stream(out, ordinal)?.unwrap_or(0),
            };
            devices::device(ordinal)?.merge(py, &problem, &arrays, stream)
        }
    }
}

impl Merged<'_> {
    /// The merge that the arrays describe.
    fn problem(&self) -> PyResult<Merge> {
        let Merged { outs, lses, out, lse, sinks } = self;
        if outs.is_empty() || outs.len() != lses.len() {
            let message = format!(
                "there are {} outs and {} lses: give one of each for every part, at least one",
                outs.len(),
                lses.len()
            );
            return Err(InputError::new_err(message));
        }
        let Some(([batch, seqlen, heads, dim], _)) = placement(out) else {
            let message = format!("out has the shape {:?}: 3 or 4 axes are needed", out.shape());
            return Err(InputError::new_err(message));
        };
        let part = dtype_of("outs", &outs[0])?;
        for view in outs {
            if view.shape() != out.shape() {
                let message =
                    format!("a part of outs has the shape {:?} and out {:?}", view.shape(), out.shape());
                return Err(InputError::new_err(message));
            }
            if dtype_of("outs", view)? != part {
                return Err(InputError::new_err("the parts of outs must be of one type"));
            }
        }
        let rows = batch * seqlen * heads;
        for (name, view, need) in lses
            .iter()
            .map(|view| ("lses", view, rows))
            .chain([("softmax_lse", lse, rows)])
            .chain(sinks.iter().map(|view| ("sinks", view, heads)))
        {
            if view.elements() != need {
                let message = format!("{name} has {} elements: it must have {need}", view.elements());
                return Err(InputError::new_err(message));
            }
        }
        let all = outs.iter().map(|view| ("outs", view)).chain(lses.iter().map(|view| ("lses", view)));
        let all = all.chain([("softmax_lse", lse)]).chain(sinks.iter().map(|view| ("sinks", view)));
        for (name, view) in all {
            if view.place != out.place {
                return Err(elsewhere(name, out.place));
            }
        }
        if out.read_only || lse.read_only {
            return Err(InputError::new_err("out is read-only, and the call writes it"));
        }
        let to = dtype_of("out", out)?;
        let sinks = sinks.is_some();
        Ok(Merge { parts: outs.len(), batch, seqlen, heads, dim, part, out: to, sinks })
    }

    /// Merges in the CPU's memory, without the interpreter's lock.
    fn on_host(&self, py: Python<'_>, problem: &Merge) -> PyResult<()> {
        match problem.part {
            Dtype::F32 => self.of_parts::<f32>(py, problem),
            Dtype::F16 => self.of_parts::<f16>(py, problem),
            Dtype::Bf16 | Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => {
                self.of_parts::<bf16>(py, problem)
            }
        }
    }

    fn of_parts<P: Element>(&self, py: Python<'_>, problem: &Merge) -> PyResult<()> {
        match problem.out {
            Dtype::F32 => self.into::<P, f32>(py),
            Dtype::F16 => self.into::<P, f16>(py),
            Dtype::Bf16 | Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => self.into::<P, bf16>(py),
        }
    }

    /// In f32, rounded once.
    fn into<P: Element, O: Element>(&self, py: Python<'_>) -> PyResult<()> {
        let parts: Vec<TensorRef<'_, P>> =
            self.outs.iter().map(|view| tensor("outs", view)).collect::<PyResult<_>>()?;
        let lses: Vec<&[f32]> = self.lses.iter().map(|view| floats("lses", view)).collect::<PyResult<_>>()?;
        let mut out: TensorMut<'_, O> = tensor_mut("out", &self.out)?;
        let merged = floats_mut("softmax_lse", &self.lse)?;
        let sinks = self.sinks.as_ref().map(|view| floats("sinks", view)).transpose()?;
        py.detach(|| {
            let ([_, seqlen, heads, dim], strides) = (out.shape(), out.strides());
            let (mut row, mut other) = (vec![0.0f32; dim], vec![0.0f32; dim]);
            // Rows in the order of the LSE: [batch, heads, seqlen].
            for (index, lse) in merged.iter_mut().enumerate() {
                let (b, h, s) = (index / (heads * seqlen), index / seqlen % heads, index % seqlen);
                row.fill(0.0);
                *lse = f32::NEG_INFINITY;
                for (part, lses) in parts.iter().zip(&lses) {
                    other.iter_mut().enumerate().for_each(|(d, to)| *to = part.at(b, s, h, d).to_f32());
                    merge_row(&mut row, lse, &other, lses[index]);
                }
                if let Some(sinks) = sinks {
                    add_sink_to_row(&mut row, lse, sinks[h]);
                }
                for (d, &value) in row.iter().enumerate() {
                    out.data_mut()[strides.offset(b, s, h, d) as usize] = O::from_f32(value);
                }
            }
        });
        Ok(())
    }
}
