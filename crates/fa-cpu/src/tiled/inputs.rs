//! What the backward is given.

use std::ops::Range;

use fa_core::Problem;

use crate::batch::Batch;
use crate::element::Element;
use crate::simd::Kernels;
use crate::view::{TensorMut, TensorRef};

/// What the backward reads: the forward's inputs and results and the gradient of its output.
#[derive(Clone, Copy, Debug)]
pub struct BackwardInputs<'a, T> {
    /// Queries.
    pub q: TensorRef<'a, T>,
    /// Keys.
    pub k: TensorRef<'a, T>,
    /// Values.
    pub v: TensorRef<'a, T>,
    /// The forward's output.
    pub out: TensorRef<'a, T>,
    /// The forward's LSE, `[batch, heads_q, seqlen_q]`.
    pub lse: &'a [f32],
    /// Gradient of the output.
    pub dout: TensorRef<'a, T>,
}

/// What a backward reads, and how it is to be run.
pub(super) struct Backward<'a, T> {
    pub kernels: Kernels,
    pub threads: Option<usize>,
    pub problem: &'a Problem,
    pub batch: &'a Batch<'a>,
    pub inputs: BackwardInputs<'a, T>,
}

/// What a backward writes.
pub(super) struct Gradients<'a, T> {
    pub dq: TensorMut<'a, T>,
    pub dk: TensorMut<'a, T>,
    pub dv: TensorMut<'a, T>,
    pub dsinks: Option<&'a mut [f32]>,
    /// Of the arrays that a program reads, each packed; empty for those that want none.
    pub darrays: Option<&'a mut Vec<Vec<f32>>>,
}

impl<T: Element> Backward<'_, T> {
    /// The LSE of a head's queries of one sequence.
    pub(super) fn lse(&self, sequence: usize, head: usize) -> &[f32] {
        let ([_, seqlen, heads, _], span) = (self.inputs.q.shape(), self.batch.sequences[sequence].q);
        let start = (span.batch * heads + head) * seqlen + span.first;
        &self.inputs.lse[start..start + span.len]
    }

    /// Takes the gradients of the LSE from `deltas`, those of the `rows` of a head of a sequence: with them
    /// dS = P (dP - (delta - dLSE)). Rows without any probability have none.
    pub(super) fn take_dlse(&self, sequence: usize, head: usize, rows: Range<usize>, deltas: &mut [f32]) {
        let Some(dlse) = self.batch.dlse(sequence, head) else { return };
        let lse = &self.lse(sequence, head)[rows.clone()];
        for ((delta, &dlse), &lse) in deltas.iter_mut().zip(&dlse[rows]).zip(lse) {
            if lse != f32::NEG_INFINITY {
                *delta -= dlse;
            }
        }
    }

    /// What the rows of one head of a sequence add to the gradient of its sink; `deltas` are the row sums of
    /// dO * O less dLSE, tile by tile, each but the last one full.
    pub(super) fn dsink<'d>(
        &self,
        sequence: usize,
        head: usize,
        deltas: impl Iterator<Item = &'d [f32]>,
    ) -> f64 {
        let Some(sink) = self.batch.sink(head) else { return 0.0 };
        let of_rows = self.lse(sequence, head).iter().zip(deltas.flatten());
        let terms = of_rows.map(|(&lse, &delta)| match delta {
            // Rows that see nothing, and rows without a sink, add nothing.
            0.0 => 0.0,
            _ if sink == f32::NEG_INFINITY => 0.0,
            _ => (f64::from(sink) - f64::from(lse)).exp() * f64::from(delta),
        });
        0.0 - terms.sum::<f64>()
    }
}
