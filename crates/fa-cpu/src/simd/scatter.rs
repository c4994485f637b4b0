//! Writing one output tensor from several threads.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use fa_core::Strides;

use super::kernels::Kernels;
use super::rows::Stored;
use crate::batch::Span;
use crate::view::TensorMut;

/// A tensor whose rows `(sequence, position, head)` are handed out to threads in tiles of consecutive
/// positions of the sequence, each tile once.
///
/// [`TensorMut`] guarantees that no two elements share storage, the order of the sequences' spans that no two
/// of them share rows, and the flags that no two threads hold the same rows. Together they make the writes of
/// all threads disjoint.
pub(crate) struct Scatter<'a, T> {
    data: *mut T,
    shape: [usize; 4],
    strides: Strides,
    /// Rows of each sequence, rows of its tiles, and its first flag.
    spans: Vec<(Span, usize, usize)>,
    taken: Vec<AtomicBool>,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: the pointer is only written through `Rows`, whose elements no one else holds (see `Scatter`).
unsafe impl<T: Send> Sync for Scatter<'_, T> {}
// SAFETY: as for a `&mut [T]`.
unsafe impl<T: Send> Send for Scatter<'_, T> {}

/// The rows of one tile, for one thread to write.
pub(crate) struct Rows<'s, T> {
    data: *mut T,
    batch: usize,
    head: usize,
    /// Row of the tensor that is the sequence's first.
    first: usize,
    /// Positions of the sequence.
    seq: Range<usize>,
    dims: usize,
    strides: Strides,
    lifetime: PhantomData<&'s mut [T]>,
}

/// The spans, each with the first flag of its tiles, and how many flags there are. Compiled once, for all
/// iterators.
fn flagged(
    shape: [usize; 4],
    spans: &mut dyn Iterator<Item = (Span, usize)>,
) -> (Vec<(Span, usize, usize)>, usize) {
    let (mut flags, mut end) = (0, (0, 0));
    let mut flagged = Vec::with_capacity(spans.size_hint().0);
    for (span, tile) in spans {
        let Span { batch, first, len } = span;
        assert!(end <= (batch, first), "{span:?} begins before what comes first has ended");
        assert!(batch < shape[0].max(1) && first + len <= shape[1], "{span:?} of {shape:?}");
        end = (batch, first + len);
        flagged.push((span, tile, flags));
        flags += shape[2] * len.div_ceil(tile);
    }
    (flagged, flags)
}

impl<'a, T: Stored> Scatter<'a, T> {
    /// Takes the tensor for as long as threads write to it. A sequence is its rows, and the length of its
    /// tiles.
    ///
    /// # Panics
    /// If the spans do not ascend, or reach out of the tensor.
    pub(crate) fn new(
        tensor: &'a mut TensorMut<'_, T>,
        mut spans: impl Iterator<Item = (Span, usize)>,
    ) -> Self {
        let (shape, strides) = (tensor.shape(), tensor.strides());
        let (spans, flags) = flagged(shape, &mut spans);
        let taken = (0..flags).map(|_| AtomicBool::new(false)).collect();
        let data = tensor.data_mut().as_mut_ptr();
        Scatter { data, shape, strides, spans, taken, lifetime: PhantomData }
    }

    /// The rows `index * tile..` of one head of a sequence.
    ///
    /// # Panics
    /// If there is no such tile or it has been taken before.
    pub(crate) fn take(&self, sequence: usize, head: usize, index: usize) -> Rows<'_, T> {
        let ([_, _, heads, dims], (span, tile, flags)) = (self.shape, self.spans[sequence]);
        let tiles = span.len.div_ceil(tile);
        assert!(head < heads && index < tiles, "no tile {index} of {sequence}, {head}");
        let flag = &self.taken[flags + head * tiles + index];
        assert!(!flag.swap(true, Ordering::Relaxed), "tile {index} of {sequence}, {head} is taken");
        let seq = index * tile..span.len.min((index + 1) * tile);
        let Span { batch, first, .. } = span;
        let (data, strides) = (self.data, self.strides);
        Rows { data, batch, head, first, seq, dims, strides, lifetime: PhantomData }
    }
}

impl<T: Stored> Rows<'_, T> {
    /// Writes the row at position `seq` of the sequence: as many of `values` as the head dim has elements,
    /// times `factor`.
    ///
    /// # Panics
    /// If the row is not in the tile, or there are too few values.
    pub(crate) fn write(&mut self, kernels: Kernels, seq: usize, values: &[f32], factor: f32) {
        assert!(self.seq.contains(&seq), "row {seq} is not in {:?}", self.seq);
        let values = &values[..self.dims];
        let start = self.strides.offset(self.batch, self.first + seq, self.head, 0) as isize;
        let step = self.strides.dim as isize;
        if step == 1 {
            // SAFETY: the row is inside the shape, which `TensorMut` checked against its storage when it was
            // made, its elements are consecutive, and only this value may write them.
            let row = unsafe { std::slice::from_raw_parts_mut(self.data.offset(start), self.dims) };
            kernels.narrow(values, factor, row);
        } else {
            for (dim, &value) in values.iter().enumerate() {
                // SAFETY: the position is inside the shape (see above), and only this value may write it.
                unsafe { self.data.offset(start + dim as isize * step).write(T::rounded(value * factor)) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use fa_core::TensorLayout;

    use super::*;
    use crate::simd::Isa;

    #[test]
    fn a_tile_is_handed_out_once_and_writes_only_its_rows() {
        let kernels = Kernels::for_isa(Isa::Portable).unwrap();
        let mut data = [0f32; 16];
        let mut tensor = TensorMut::packed("t", &mut data, [1, 4, 2, 2], TensorLayout::Bshd).unwrap();
        // Row 0 belongs to no sequence; three rows to the first, none to the second.
        let spans = [(1, 3), (4, 0)].map(|(first, len)| (Span { batch: 0, first, len }, 2));
        let scatter = Scatter::new(&mut tensor, spans.into_iter());
        let mut rows = scatter.take(0, 1, 0);
        rows.write(kernels, 1, &[7.0, 8.0, 100.0], 2.0);
        let refused = |f: &mut dyn FnMut()| {
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err());
        };
        refused(&mut || rows.write(kernels, 2, &[9.0; 2], 1.0));
        refused(&mut || rows.write(kernels, 0, &[9.0], 1.0));
        refused(&mut || {
            scatter.take(0, 1, 0);
        });
        refused(&mut || {
            scatter.take(0, 0, 2);
        });
        refused(&mut || {
            scatter.take(1, 0, 0);
        });
        scatter.take(0, 1, 1).write(kernels, 2, &[5.0, 6.0], 1.0);
        drop(scatter);
        for spans in [[(1, 3), (3, 1)], [(1, 3), (0, 1)], [(0, 1), (3, 2)]] {
            let spans = spans.map(|(first, len)| (Span { batch: 0, first, len }, 2));
            refused(&mut || {
                Scatter::new(&mut tensor, spans.into_iter());
            });
        }
        assert_eq!(data, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 14.0, 16.0, 0.0, 0.0, 5.0, 6.0]);
    }
}
