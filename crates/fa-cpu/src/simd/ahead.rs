//! Memory that is asked for before it is read.
#![allow(unsafe_code)]

use super::row_set::RowSet;
use super::vector::Vector;

/// What to prefetch during a computation.
#[derive(Clone, Copy)]
pub(crate) enum Ahead<'a, T> {
    /// Nothing is fetched.
    Nothing,
    /// The rows to come, into the second-level cache: each is a few cache lines, which the hardware's own
    /// prefetching follows too late. (To the first level are fewer lines under way at once.)
    /// For rows at a constant stride; elsewhere the fetches are useless.
    Follow,
    /// This many values of each of these rows, in the order of their addresses, into the second-level cache.
    /// Where the heads of a key are adjacent and computed one by one, a head's rows are a few cache lines
    /// each at a large stride, which the hardware prefetcher follows at a third of its rate.
    Rows(&'a [&'a [T]], usize),
}

/// Bytes of rows between the one that is computed and the one that [`Ahead::Follow`] fetches: a page, which
/// is as far as the hardware's own prefetching goes.
const FOLLOW: usize = 4096;
/// Bytes of a cache line.
const LINE: usize = 64;

impl<T> Ahead<'_, T> {
    /// Bytes from a row of `rows` to the one that [`Ahead::Follow`] fetches, of rows of `dims` values.
    #[inline(always)]
    pub(super) fn distance(self, rows: &RowSet<'_, T>, dims: usize) -> Option<isize> {
        let stride = match *rows {
            RowSet::Strided { step, count: 2.., .. } => (step * size_of::<T>()) as isize,
            RowSet::Listed([first, second, ..]) => {
                (second.as_ptr() as isize).wrapping_sub(first.as_ptr() as isize)
            }
            RowSet::Strided { .. } | RowSet::Listed(_) => return None,
        };
        match self {
            Ahead::Follow => {
                let rows = (FOLLOW / (dims * size_of::<T>()).max(1)).clamp(8, 32);
                Some(stride.wrapping_mul(rows as isize))
            }
            Ahead::Nothing | Ahead::Rows(..) => None,
        }
    }

    /// [`Ahead::Rows`] in equal parts, one for each of this many steps: fetching a few lines at a time does
    /// not stall.
    #[inline(always)]
    pub(super) fn parts(&self, steps: usize) -> Parts<'_, T> {
        let (rows, values): (&[&[T]], usize) = match *self {
            Ahead::Rows(rows, values) => (rows, values),
            Ahead::Nothing | Ahead::Follow => (&[], 0),
        };
        let lines = (values * size_of::<T>()).div_ceil(LINE);
        Parts { rows, lines, each: (lines * rows.len()).div_ceil(steps.max(1)), row: 0, line: 0 }
    }
}

/// Progress of [`Ahead::Rows`].
pub(super) struct Parts<'a, T> {
    rows: &'a [&'a [T]],
    /// Lines of a row, and of a part.
    lines: usize,
    each: usize,
    /// The next line.
    row: usize,
    line: usize,
}

impl<T> Parts<'_, T> {
    #[inline(always)]
    pub(super) unsafe fn fetch<V: Vector>(&mut self) {
        for _ in 0..self.each {
            let Some(row) = self.rows.get(self.row) else { return };
            // SAFETY: nothing is read.
            unsafe { V::prefetch(row.as_ptr().cast::<u8>().wrapping_add(self.line * LINE)) };
            self.line += 1;
            if self.line == self.lines {
                (self.row, self.line) = (self.row + 1, 0);
            }
        }
    }
}

/// Fetches `count` values at a distance from others, in order.
#[inline(always)]
pub(super) unsafe fn follow<V: Vector, T>(from: *const T, distance: isize, count: usize) {
    let start = from.cast::<u8>().wrapping_offset(distance);
    for byte in (0..count * size_of::<T>()).step_by(LINE) {
        // SAFETY: nothing is read.
        unsafe { V::prefetch(start.wrapping_add(byte)) };
    }
}
