//! Vectors and matrices of the formula, in any precision.

use crate::real::Real;

/// Of each row of a matrix. With them the size of the terms that make a result is bounded, which is what the
/// roundings of any computation of it are relative to: see [`super::Gradients::dq_noise`].
pub(super) struct Norms<R> {
    /// Euclidean: `|a . b| <= sum |a b| <= norm(a) norm(b)`.
    pub norm: Vec<R>,
    /// Largest magnitude.
    pub largest: Vec<R>,
}

impl<R: Real> Norms<R> {
    pub(super) fn of(matrix: &[R], dim: usize) -> Self {
        let largest = |row: &[R]| row.iter().fold(R::ZERO, |max, &value| max.max(abs(value)));
        Norms {
            norm: matrix.chunks(dim).map(norm).collect(),
            largest: matrix.chunks(dim).map(largest).collect(),
        }
    }
}

pub(super) fn norm<R: Real>(row: &[R]) -> R {
    dot(row, row).sqrt()
}

pub(super) fn abs<R: Real>(value: R) -> R {
    value.max(R::ZERO - value)
}

/// The sum of equally long vectors.
pub(super) fn sum<'a, R: Real>(mut vectors: impl Iterator<Item = &'a [R]>) -> Vec<R> {
    let mut sum = vectors.next().map(<[R]>::to_vec).unwrap_or_default();
    for vector in vectors {
        add_scaled(&mut sum, R::ONE, vector);
    }
    sum
}

pub(super) fn row_mut<R>(matrix: &mut [R], index: usize, dim: usize) -> &mut [R] {
    &mut matrix[index * dim..(index + 1) * dim]
}

/// Eight partial sums, so that the compiler may use vector registers without changing the order of any sum.
#[inline(always)]
pub(super) fn dot<R: Real>(a: &[R], b: &[R]) -> R {
    let (a_chunks, a_rest) = a.as_chunks::<8>();
    let (b_chunks, b_rest) = b.as_chunks::<8>();
    let mut sums = [R::ZERO; 8];
    for (x, y) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..8 {
            sums[lane] += x[lane] * y[lane];
        }
    }
    let rest = a_rest.iter().zip(b_rest).fold(R::ZERO, |sum, (&x, &y)| sum + x * y);
    sums.iter().fold(rest, |sum, &part| sum + part)
}

/// `to += factor * from`.
#[inline(always)]
pub(super) fn add_scaled<R: Real>(to: &mut [R], factor: R, from: &[R]) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}
