//! The rows of keys: those of K, or of a latent problem V's followed by K's.

use fa_core::Problem;

use crate::batch::Batch;
use crate::codes::Values;
use crate::element::Element;
use crate::real::Real;
use crate::view::TensorRef;

/// Keys as one tensor, or as two side by side.
#[derive(Clone, Copy)]
pub(crate) struct Keys<'a, T> {
    /// The first columns.
    pub first: Values<'a, T>,
    /// The columns behind them.
    pub rest: Option<Values<'a, T>>,
}

impl<'a, T: Element> Keys<'a, T> {
    /// Those of a problem, whose K and V have been checked.
    pub(crate) fn of(problem: &Problem, k: Values<'a, T>, v: Values<'a, T>) -> Self {
        match problem.latent {
            false => Keys::from(k),
            true => Keys { first: v, rest: Some(k).filter(|k| k.shape()[3] > 0) },
        }
    }

    /// One or both tensors, from left to right.
    pub(crate) fn parts(&self) -> impl Iterator<Item = Values<'a, T>> {
        std::iter::once(self.first).chain(self.rest)
    }

    /// Elements of a row.
    pub(crate) fn dims(&self) -> usize {
        self.parts().map(|part| part.shape()[3]).sum()
    }

    /// Appends the row of a key as numbers.
    pub(crate) fn append_row<R: Real>(&self, batch: &Batch<'_>, at: [usize; 3], to: &mut Vec<R>) {
        self.parts().for_each(|part| part.append_row(batch, at, to));
    }

    /// One element, exactly.
    pub(crate) fn number(&self, batch: &Batch<'_>, at: [usize; 3], dim: usize) -> f64 {
        match (self.rest, dim.checked_sub(self.first.shape()[3])) {
            (Some(rest), Some(dim)) => rest.number(batch, at, dim),
            _ => self.first.number(batch, at, dim),
        }
    }
}

impl<'a, T> From<Values<'a, T>> for Keys<'a, T> {
    fn from(first: Values<'a, T>) -> Self {
        Keys { first, rest: None }
    }
}

impl<'a, T> From<TensorRef<'a, T>> for Keys<'a, T> {
    fn from(first: TensorRef<'a, T>) -> Self {
        Keys::from(Values::Same(first))
    }
}
