//! The kernels of [`super::rows`] and [`super::row_products`] behind methods that check every length.
#![allow(unsafe_code)]

use super::ahead::Ahead;
use super::kernels::Kernels;
use super::row_products::{Factor, RawAccumulate, RawDots};
use super::row_set::RowSet;
use super::rows::{RawRow, Stored};
use super::tile::extent;

impl Kernels {
    /// Numbers as f32.
    ///
    /// # Panics
    /// If the lengths differ.
    pub(crate) fn widen<T: Stored>(&self, from: &[T], to: &mut [f32]) {
        assert_eq!(from.len(), to.len(), "as many numbers in as out");
        // SAFETY: lengths were just checked, and the table was given out for a CPU that has the instructions.
        unsafe { (T::kernels(&self.table.rows_of).widen)(from.as_ptr(), to.as_mut_ptr(), to.len()) }
    }

    /// f32 numbers times `factor`, rounded to nearest even.
    ///
    /// # Panics
    /// If `from` is shorter than `to`.
    pub(crate) fn narrow<T: Stored>(&self, from: &[f32], factor: f32, to: &mut [T]) {
        assert!(from.len() >= to.len(), "{} numbers for {}", from.len(), to.len());
        let narrow = T::kernels(&self.table.rows_of).narrow;
        // SAFETY: lengths were just checked, and the table was given out for a CPU that has the instructions.
        unsafe { narrow(from.as_ptr(), factor, to.as_mut_ptr(), to.len()) }
    }

    /// `s[query][key] = keys[key] . q[query]` for rows of `dims` values, `q` at stride `ldq`, `s` at `lds`,
    /// while `ahead` is prefetched.
    ///
    /// # Panics
    /// If a row or a buffer is shorter than that.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn dots<T: Factor>(
        &self,
        keys: RowSet<'_, T>,
        ahead: Ahead<'_, T>,
        dims: usize,
        queries: usize,
        q: &[f32],
        ldq: usize,
        s: &mut [f32],
        lds: usize,
    ) {
        assert!(keys.reach(dims), "a key is too short");
        assert!(ldq >= dims && lds >= keys.len(), "strides {ldq} and {lds}");
        assert!(q.len() >= extent(queries, dims, ldq), "Q is too short");
        assert!(s.len() >= extent(queries, keys.len(), lds), "scores are too short");
        let raw = RawDots { keys, ahead, dims, queries, q: q.as_ptr(), ldq, s: s.as_mut_ptr(), lds };
        // SAFETY: lengths were just checked, and the table was given out for a CPU that has the instructions.
        unsafe { (T::products(&self.table.products_of).dots)(&raw) }
    }

    /// `o[query] += sum of p[query][key] * values[key]` for rows of `dims` values, `p` at stride `ldp`, `o`
    /// at `ldo`, while `ahead` is prefetched.
    ///
    /// # Panics
    /// If a row or a buffer is shorter than that.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn accumulate<T: Factor>(
        &self,
        values: RowSet<'_, T>,
        ahead: Ahead<'_, T>,
        dims: usize,
        queries: usize,
        p: &[f32],
        ldp: usize,
        o: &mut [f32],
        ldo: usize,
    ) {
        assert!(values.reach(dims), "a value is too short");
        assert!(ldp >= values.len() && ldo >= dims, "strides {ldp} and {ldo}");
        assert!(p.len() >= extent(queries, values.len(), ldp), "P is too short");
        assert!(o.len() >= extent(queries, dims, ldo), "O is too short");
        let raw = RawAccumulate { values, ahead, dims, queries, p: p.as_ptr(), ldp, o: o.as_mut_ptr(), ldo };
        // SAFETY: lengths were just checked, and the table was given out for a CPU that has the instructions.
        unsafe { (T::products(&self.table.products_of).accumulate)(&raw) }
    }

    /// Online softmax (base 2) of one row: scores become probabilities `2^(score - max)`; returns the new
    /// maximum and sum, and the factor on what was accumulated under the old maximum.
    ///
    /// # Panics
    /// If the length is no multiple of the lanes.
    pub(crate) fn row_softmax(&self, scores: &mut [f32], max: f32, sum: f32) -> [f32; 3] {
        assert!(scores.len().is_multiple_of(self.lanes()), "{} scores", scores.len());
        let raw = RawRow { scores: scores.as_mut_ptr(), len: scores.len(), max, sum };
        // SAFETY: the length was just checked, and the table was given out for a CPU that has the
        // instructions.
        unsafe { (self.table.rows_of.softmax)(&raw) }
    }
}
