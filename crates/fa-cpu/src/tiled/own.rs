//! The backward of rows whose LSE holds no probability any more: where a bias is so low that f32 rounds what
//! else there is to it, as where a mask of -1e9 hides a whole row. Softmaxes are computed anew, row by row.

use fa_core::Problem;

use super::inputs::Gradients;
use crate::batch::Batch;
use crate::element::Element;
use crate::error::CpuError;
use crate::extras::Arguments;
use crate::reference::in_f32;
use crate::view::{TensorMut, TensorRef};

/// The largest LSE that a row's probabilities are found from: beyond, f32 leaves it less than 11 bits behind
/// the point.
const LARGEST: f32 = 4096.0;

/// Whether a backward is one of these.
pub(super) fn applies(problem: &Problem, lse: &[f32]) -> bool {
    problem.score.kind().changes() && lse.iter().any(|lse| lse.is_finite() && lse.abs() > LARGEST)
}

/// The backward of checked tensors.
pub(super) fn backward<T: Element>(
    problem: &Problem,
    arguments: &Arguments<'_>,
    inputs: [&TensorRef<'_, T>; 4],
    to: &mut Gradients<'_, T>,
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
    if let Some(darrays) = &mut to.darrays {
        **darrays = found.darrays;
    }
    Ok(())
}

/// Rows of sequences from a packed tensor.
fn scatter<T: Element>(
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
