//! What the backward is given.

use crate::view::TensorRef;

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
