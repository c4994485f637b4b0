//! Heads of sequences: read from tensors, computed in parallel, put together to packed tensors.

use fa_core::Problem;
use rayon::prelude::*;

use crate::batch::{Batch, Span};
use crate::codes::Values;
use crate::element::Element;
use crate::real::Real;
use crate::threads;
use crate::view::TensorRef;

/// `compute(sequence, query head)` for all of them, in parallel, in order.
pub(super) fn for_each_head<A: Send>(
    problem: &Problem,
    batch: &Batch<'_>,
    compute: impl Fn(usize, usize) -> A + Sync,
) -> Vec<A> {
    let heads = 0..batch.sequences.len() * problem.heads_q;
    let compute = |index| compute(index / problem.heads_q, index % problem.heads_q);
    if threads::current() == 1 {
        return heads.map(compute).collect();
    }
    heads.into_par_iter().map(compute).collect()
}

/// One head of a tensor of queries, packed `[rows of the sequence, dim]`.
pub(super) fn gather_queries<R: Real, T: Element>(
    tensor: &TensorRef<'_, T>,
    batch: &Batch<'_>,
    sequence: usize,
    head: usize,
) -> Vec<R> {
    let (Span { batch, first, len }, dim) = (batch.sequences[sequence].q, tensor.shape()[3]);
    let mut rows = Vec::with_capacity(len * dim);
    (first..first + len).for_each(|row| R::append_row(&tensor.row(batch, row, head), &mut rows));
    rows
}

/// One head of keys or values, packed `[rows of the sequence, dim]`.
pub(super) fn gather_keys<R: Real, T: Element>(
    values: &Values<'_, T>,
    batch: &Batch<'_>,
    sequence: usize,
    head: usize,
) -> Vec<R> {
    let (len, dim) = (batch.sequences[sequence].k.len, values.shape()[3]);
    let mut rows = Vec::with_capacity(len * dim);
    (0..len).for_each(|key| values.append_row(batch, [sequence, key, head], &mut rows));
    rows
}

/// `[sequences * heads][rows, dim]` to a packed tensor of `shape`; rows of no sequence are NaN.
pub(super) fn interleave<R: Real>(per_head: &[impl AsRef<[R]>], spans: &[Span], shape: [usize; 4]) -> Vec<R> {
    let [_, seqlen, heads, dim] = shape;
    let mut packed = vec![R::NAN; shape.iter().product()];
    for (of_sequence, span) in per_head.chunks(heads).zip(spans) {
        for (h, head) in of_sequence.iter().enumerate() {
            for s in 0..span.len {
                let at = ((span.batch * seqlen + span.first + s) * heads + h) * dim;
                packed[at..at + dim].copy_from_slice(row(head.as_ref(), s, dim));
            }
        }
    }
    packed
}

/// Row `index` of a matrix.
pub(super) fn row<R>(matrix: &[R], index: usize, dim: usize) -> &[R] {
    &matrix[index * dim..(index + 1) * dim]
}
