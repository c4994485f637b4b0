//! Rows of K or V as they lie.
#![allow(unsafe_code)]

use std::ops::Range;

use super::tile::extent;

/// Some rows of a tensor.
#[derive(Clone, Copy)]
pub(crate) enum RowSet<'a, T> {
    /// `count` rows, one at the beginning of `data` and at every `step`: no list has to be made.
    Strided { data: &'a [T], step: usize, count: usize },
    /// Each for itself.
    Listed(&'a [&'a [T]]),
}

impl<'a, T> RowSet<'a, T> {
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        match *self {
            RowSet::Strided { count, .. } => count,
            RowSet::Listed(rows) => rows.len(),
        }
    }

    /// Some of them.
    pub(crate) fn part(&self, range: Range<usize>) -> RowSet<'a, T> {
        match *self {
            RowSet::Strided { .. } if range.is_empty() => RowSet::Listed(&[]),
            RowSet::Strided { data, step, count } => {
                assert!(range.end <= count, "rows {range:?} of {count}");
                RowSet::Strided { data: &data[range.start * step..], step, count: range.len() }
            }
            RowSet::Listed(rows) => RowSet::Listed(&rows[range]),
        }
    }

    /// Whether each row has `dims` values; no branch for each, which took a tenth of a product's time.
    pub(super) fn reach(&self, dims: usize) -> bool {
        match *self {
            RowSet::Strided { data, step, count } => data.len() >= extent(count, dims, step),
            RowSet::Listed(rows) => rows.iter().fold(true, |all, row| all & (row.len() >= dims)),
        }
    }

    /// Where a row begins.
    ///
    /// # Safety
    /// There must be one of this number, and rows must [reach](Self::reach).
    #[inline(always)]
    pub(super) unsafe fn row(&self, index: usize) -> *const T {
        match *self {
            // SAFETY: the caller's: the row lies within `data`.
            RowSet::Strided { data, step, .. } => unsafe { data.as_ptr().add(index * step) },
            // SAFETY: the caller's.
            RowSet::Listed(rows) => unsafe { rows.get_unchecked(index).as_ptr() },
        }
    }
}
