//! From tensors of any element type and strides to f32 rows.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::buffer::Buffer;
use super::schedule;
use super::work::Unit;
use crate::batch::{Batch, Span};
use crate::codes::Values;
use crate::element::Element;
use crate::simd::row_set::RowSet;
use crate::simd::{Kernels, Work, cast, widest};
use crate::view::TensorRef;

/// A row stride of at least `len` values that is an odd number of cache lines: a column of a tile then
/// spreads over all sets of the first-level cache.
pub(super) fn row_stride(len: usize) -> usize {
    (len.div_ceil(16) | 1) * 16
}

/// K or V of a call.
#[derive(Clone, Copy)]
pub(super) struct KeyRows<'a, T> {
    values: Values<'a, T>,
    batch: &'a Batch<'a>,
    /// The tensor itself, where it is f32 with the head dim contiguous: products read its rows as they lie.
    in_place: Option<TensorRef<'a, f32>>,
}

impl<'a, T: Element> KeyRows<'a, T> {
    pub(super) fn new(values: &Values<'a, T>, batch: &'a Batch<'a>) -> Self {
        let strides = values.strides();
        let lies_well = strides.dim == 1 && strides.seq >= values.shape()[3] as i64 && !batch.is_paged();
        let in_place = match values {
            Values::Same(tensor) if lies_well => cast::tensor(tensor),
            Values::Same(_) | Values::Codes(_) => None,
        };
        KeyRows { values: *values, batch, in_place }
    }

    /// Elements of a row.
    pub(super) fn dims(&self) -> usize {
        self.values.shape()[3]
    }

    /// Whether rows have to be converted.
    pub(super) fn converts(&self) -> bool {
        self.in_place.is_none()
    }

    /// Whether they are codes, which are decoded tile by tile wherever they are needed.
    pub(super) fn are_codes(&self) -> bool {
        matches!(self.values, Values::Codes(_))
    }

    /// Whether rows are contiguous in the tensor, or decoded.
    pub(super) fn has_slices(&self) -> bool {
        self.are_codes() || self.values.strides().dim == 1
    }

    /// Values of the rows of this many consecutive heads, where they are contiguous.
    pub(super) fn across(&self, heads: usize) -> usize {
        let strides = self.values.strides();
        let next = strides.head;
        let side_by_side = next >= 0 && next < strides.seq;
        if side_by_side { (heads - 1) * next as usize + self.dims() } else { self.dims() }
    }

    /// Some rows of one head as f32, and the distance between them: as they lie, or converted into `scratch`.
    pub(super) fn tile<'s>(
        &'s self,
        kernels: Kernels,
        Unit { sequence, kv_head }: Unit,
        keys: Range<usize>,
        scratch: &'s mut [f32],
    ) -> (&'s [f32], usize) {
        if let Some(tensor) = &self.in_place {
            let (Span { batch, first, .. }, strides) = (self.batch.sequences[sequence].k, tensor.strides());
            let start = strides.offset(batch, first + keys.start, kv_head, 0) as usize;
            return (tensor.data().get(start..).unwrap_or(&[]), strides.seq as usize);
        }
        let ld = row_stride(self.dims());
        self.read(kernels, Unit { sequence, kv_head }, keys, scratch, ld);
        (scratch, ld)
    }

    /// Some rows of one head as f32, at stride `ld`, with zeros behind each.
    pub(super) fn read(
        &self,
        kernels: Kernels,
        Unit { sequence, kv_head }: Unit,
        keys: Range<usize>,
        to: &mut [f32],
        ld: usize,
    ) {
        for (key, row) in keys.zip(to.chunks_mut(ld)) {
            let (outer, inner) = self.batch.key(sequence, key);
            let (row, padding) = row.split_at_mut(self.dims());
            match &self.values {
                Values::Same(tensor) => read_row(kernels, tensor, [outer, inner, kv_head], row),
                Values::Codes(rows) => rows.read(sequence, [outer, inner, kv_head], row),
            }
            padding.fill(0.0);
        }
    }

    /// Some rows of one head as they lie, listed in `list` where they are not at one step; the tensor [has
    /// slices](Self::has_slices), and no codes.
    pub(super) fn rows<'s>(
        &self,
        unit: Unit,
        keys: Range<usize>,
        list: &'s mut Vec<&'a [T]>,
    ) -> RowSet<'s, T> {
        debug_assert!(!self.are_codes(), "codes are decoded");
        if let Some((data, step)) = self.strided(unit, &keys) {
            return RowSet::Strided { data, step, count: keys.len() };
        }
        self.slices(unit, keys, list);
        RowSet::Listed(list)
    }

    /// The tensor from the first row on and the distance between rows, where they follow each other.
    fn strided(&self, Unit { sequence, kv_head }: Unit, keys: &Range<usize>) -> Option<(&'a [T], usize)> {
        let Values::Same(tensor) = &self.values else { return None };
        if self.batch.is_paged() || keys.is_empty() {
            return None;
        }
        let (Span { batch, first, .. }, strides) = (self.batch.sequences[sequence].k, tensor.strides());
        let step = usize::try_from(strides.seq).ok().filter(|&step| step >= self.dims().max(1))?;
        let start = strides.offset(batch, first + keys.start, kv_head, 0) as usize;
        Some((&tensor.data()[start..], step))
    }

    /// The same as a list; empty for codes, of which no element lies in the tensor.
    pub(super) fn slices(&self, unit: Unit, keys: Range<usize>, to: &mut Vec<&'a [T]>) {
        to.clear();
        let Values::Same(tensor) = &self.values else { return };
        let (dims, strides, data) = (self.dims(), tensor.strides(), tensor.data());
        if let Some((data, step)) = self.strided(unit, &keys) {
            return to.extend(data.chunks(step).take(keys.len()).map(|row| &row[..dims]));
        }
        to.extend(keys.map(|key| {
            let (outer, inner) = self.batch.key(unit.sequence, key);
            let start = strides.offset(outer, inner, unit.kv_head, 0) as usize;
            &data[start..start + dims]
        }));
    }
}

/// K or V of the units that several items share, converted by all threads.
pub(super) struct Shared<'a, T> {
    rows: KeyRows<'a, T>,
    data: Buffer,
    /// Where each unit's rows begin; `None` where items convert what they need.
    starts: Vec<Option<usize>>,
    ld: usize,
}

impl<'a, T: Element> Shared<'a, T> {
    /// Converts (where they have to be) the rows of K and of V of all `units` that are `shared`.
    pub(super) fn of(
        kernels: Kernels,
        threads: Option<usize>,
        both: [KeyRows<'a, T>; 2],
        units: &[Unit],
        shared: &[bool],
    ) -> [Self; 2] {
        /// A few hundred kilobytes per piece: small enough to distribute, large enough to hide the overhead.
        const ROWS: usize = 512;
        let mut tensors = both.map(|rows| {
            let (ld, mut len) = (row_stride(rows.dims()), 0);
            let starts = units.iter().zip(shared).map(|(unit, &shared)| {
                (shared && rows.converts() && !rows.are_codes()).then(|| {
                    let start = len;
                    len += rows.batch.sequences[unit.sequence].k.len * ld;
                    start
                })
            });
            let starts = starts.collect();
            Shared { rows, data: Buffer::uncleared(len), starts, ld }
        });
        let mut pieces = Vec::new();
        for Shared { rows, data, starts, ld } in &mut tensors {
            let mut rest = &mut data[..];
            for (&unit, _) in units.iter().zip(starts).filter(|(_, start)| start.is_some()) {
                let keys = rows.batch.sequences[unit.sequence].k.len;
                for first in (0..keys).step_by(ROWS) {
                    let keys = first..keys.min(first + ROWS);
                    let (piece, after) = std::mem::take(&mut rest).split_at_mut(keys.len() * *ld);
                    rest = after;
                    pieces.push(Mutex::new((*rows, *ld, unit, keys, piece)));
                }
            }
        }
        schedule::run(
            pieces.len(),
            threads,
            || (),
            |(), piece| {
                let mut piece = pieces[piece].lock().unwrap_or_else(PoisonError::into_inner);
                let (rows, ld, unit, keys, to) = &mut *piece;
                rows.read(kernels, *unit, keys.clone(), to, *ld);
            },
        );
        drop(pieces);
        tensors
    }

    /// Some rows of unit number `index`, and the distance between them.
    pub(super) fn tile<'s>(
        &'s self,
        kernels: Kernels,
        index: usize,
        unit: Unit,
        keys: Range<usize>,
        scratch: &'s mut [f32],
    ) -> (&'s [f32], usize) {
        match self.starts[index] {
            Some(start) => (&self.data[start + keys.start * self.ld..], self.ld),
            None => self.rows.tile(kernels, unit, keys, scratch),
        }
    }
}

/// Whether `count` rows of `dims` values at stride `ld` hold neither infinities nor NaN.
pub(super) fn all_finite(rows: &[f32], count: usize, dims: usize, ld: usize) -> bool {
    struct Finite<'a>(&'a [f32], usize, usize, usize);
    impl Work for Finite<'_> {
        type Output = bool;
        #[inline(always)]
        fn run(self) -> bool {
            let Finite(rows, count, dims, ld) = self;
            (0..count).all(|row| is_finite(&rows[row * ld..][..dims]))
        }
    }
    widest(Finite(rows, count, dims, ld))
}

/// Whether all values are neither infinities nor NaN.
#[inline(always)]
pub(super) fn is_finite(values: &[f32]) -> bool {
    // No early exit: the largest of all bits (without the sign) vectorises.
    let largest = values.iter().fold(0, |max, value| max.max(value.to_bits() << 1));
    largest < f32::INFINITY.to_bits() << 1
}

/// Row `(batch, seq, head)` as f32.
pub(super) fn read_row<T: Element>(
    kernels: Kernels,
    tensor: &TensorRef<'_, T>,
    [batch, seq, head]: [usize; 3],
    to: &mut [f32],
) {
    let strides = tensor.strides();
    if strides.dim == 1 {
        let start = strides.offset(batch, seq, head, 0) as usize;
        kernels.widen(&tensor.data()[start..start + to.len()], to);
    } else {
        for (dim, to) in to.iter_mut().enumerate() {
            *to = tensor.at(batch, seq, head, dim).to_f32();
        }
    }
}

/// Rows `first..first + rows` of one head, multiplied by `scale`, at stride `ld`.
pub(super) fn read_rows<T: Element>(
    kernels: Kernels,
    tensor: &TensorRef<'_, T>,
    [batch, first, head]: [usize; 3],
    rows: usize,
    scale: f32,
    to: &mut [f32],
    ld: usize,
) {
    let dims = tensor.shape()[3];
    for (i, row) in to.chunks_mut(ld).take(rows).enumerate() {
        let row = &mut row[..dims];
        read_row(kernels, tensor, [batch, first + i, head], row);
        if scale != 1.0 {
            row.iter_mut().for_each(|value| *value *= scale);
        }
    }
}

/// The sum of products, in an order that vectorises.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; 16];
    for (a, b) in a.chunks(16).zip(b.chunks(16)) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}
