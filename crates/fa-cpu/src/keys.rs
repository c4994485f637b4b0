//! The rows of keys: those of K, or of a latent problem V's followed by K's.

use fa_core::Problem;

use crate::view::TensorRef;

/// Keys as one tensor, or as two side by side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keys<'a, T> {
    /// The first columns.
    pub first: TensorRef<'a, T>,
    /// The columns behind them.
    pub rest: Option<TensorRef<'a, T>>,
}

impl<'a, T: Copy> Keys<'a, T> {
    /// Those of a problem, whose K and V have been checked.
    pub(crate) fn of(problem: &Problem, k: &TensorRef<'a, T>, v: &TensorRef<'a, T>) -> Self {
        match problem.latent {
            false => Keys::from(*k),
            true => Keys { first: *v, rest: Some(*k).filter(|k| k.shape()[3] > 0) },
        }
    }

    /// One or both tensors, from left to right.
    pub(crate) fn parts(&self) -> impl Iterator<Item = TensorRef<'a, T>> {
        std::iter::once(self.first).chain(self.rest)
    }

    /// Elements of a row.
    pub(crate) fn dims(&self) -> usize {
        self.parts().map(|part| part.shape()[3]).sum()
    }

    /// The element at `(batch, seq, head, dim)`.
    pub(crate) fn at(&self, batch: usize, seq: usize, head: usize, dim: usize) -> T {
        match (self.rest, dim.checked_sub(self.first.shape()[3])) {
            (Some(rest), Some(dim)) => rest.at(batch, seq, head, dim),
            _ => self.first.at(batch, seq, head, dim),
        }
    }
}

impl<'a, T> From<TensorRef<'a, T>> for Keys<'a, T> {
    fn from(first: TensorRef<'a, T>) -> Self {
        Keys { first, rest: None }
    }
}
