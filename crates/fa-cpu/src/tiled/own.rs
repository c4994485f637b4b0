//! Problems with a mask or a change of scores of the caller's own: a thread computes a head, row by row, and
//! evaluates the program for each key that the band leaves visible.

use fa_core::Problem;

use super::inputs::Gradients;
use crate::batch::Batch;
use crate::codes::KvRef;
use crate::element::Element;
use crate::error::CpuError;
use crate::extras::Arguments;
use crate::reference::in_f32;
use crate::view::{TensorMut, TensorRef};

/// Whether a problem is one of these.
pub(super) fn applies(problem: &Problem) -> bool {
    problem.score.program.is_some()
}

/// The forward of checked tensors.
pub(super) fn forward<T: Element>(
    problem: &Problem,
    arguments: &Arguments<'_>,
    q: &TensorRef<'_, T>,
    kv: [KvRef<'_, T>; 2],
    out: &mut TensorMut<'_, T>,
    lse: Option<&mut [f32]>,
) -> Result<(), CpuError> {
    let found = in_f32::forward(problem, arguments, q, kv)?;
    let batch = Batch::new(problem, arguments)?;
    let rows = |index: usize| {
        let span = batch.sequences[index].q;
        (span.batch, span.first..span.first + span.len)
    };
    scatter(&found.out, out, (0..batch.sequences.len()).map(rows));
    if let Some(lse) = lse {
        let [_, seqlen, heads, _] = crate::check::q_shape(problem);
        for span in batch.sequences.iter().map(|sequence| sequence.q) {
            for head in 0..heads {
                let start = (span.batch * heads + head) * seqlen + span.first;
                lse[start..start + span.len].copy_from_slice(&found.lse[start..start + span.len]);
            }
        }
    }
    Ok(())
}

/// The backward of checked tensors. `darrays` takes the gradients of the program's arrays, each packed, and
/// empty where an array wants none.
pub(super) fn backward<T: Element>(
    problem: &Problem,
    arguments: &Arguments<'_>,
    inputs: [&TensorRef<'_, T>; 4],
    to: &mut Gradients<'_, T>,
    darrays: Option<&mut Vec<Vec<f32>>>,
) -> Result<(), CpuError> {
    let found = in_f32::backward(problem, arguments, inputs)?;
    let batch = Batch::new(problem, arguments)?;
    let count = 0..batch.sequences.len();
    let queries = |index: usize| {
        let span = batch.sequences[index].q;
        (span.batch, span.first..span.first + span.len)
    };
    let keys = |index: usize| {
        let span = batch.sequences[index].k;
        (span.batch, span.first..span.first + span.len)
    };
    scatter(&found.dq, &mut to.dq, count.clone().map(queries));
    scatter(&found.dk, &mut to.dk, count.clone().map(keys));
    scatter(&found.dv, &mut to.dv, count.map(keys));
    if let Some(dsinks) = &mut to.dsinks {
        dsinks.copy_from_slice(&found.dsinks);
    }
    if let Some(darrays) = darrays {
        *darrays = found.darrays;
    }
    Ok(())
}

/// Rows of sequences from a packed tensor.
pub(super) fn scatter<T: Element>(
    packed: &[f32],
    to: &mut TensorMut<'_, T>,
    rows: impl Iterator<Item = (usize, std::ops::Range<usize>)>,
) {
    let ([_, seqlen, heads, dim], strides) = (to.shape(), to.strides());
    let data = to.data_mut();
    for (batch, rows) in rows {
        for row in rows {
            for head in 0..heads {
                let from = ((batch * seqlen + row) * heads + head) * dim;
                for (at, &value) in packed[from..from + dim].iter().enumerate() {
                    data[strides.offset(batch, row, head, at) as usize] = T::from_f32(value);
                }
            }
        }
    }
}
