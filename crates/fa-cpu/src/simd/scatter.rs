//! Writing one output tensor from several threads.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use fa_core::Strides;

use crate::view::TensorMut;

/// A tensor whose rows `(batch, seq, head)` are handed out to threads in tiles of `tile` consecutive
/// positions of the sequence, each tile once.
///
/// [`TensorMut`] guarantees that no two elements share storage; the flags guarantee that no two threads hold
/// the same rows. Together they make the writes of all threads disjoint.
pub(crate) struct Scatter<'a, T> {
    data: *mut T,
    shape: [usize; 4],
    strides: Strides,
    tile: usize,
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
    seq: Range<usize>,
    dims: usize,
    strides: Strides,
    lifetime: PhantomData<&'s mut [T]>,
}

impl<'a, T: Copy> Scatter<'a, T> {
    /// Takes the tensor for as long as threads write to it.
    pub(crate) fn new(tensor: &'a mut TensorMut<'_, T>, tile: usize) -> Self {
        let (shape, strides) = (tensor.shape(), tensor.strides());
        let tiles = shape[0] * shape[2] * shape[1].div_ceil(tile);
        let taken = (0..tiles).map(|_| AtomicBool::new(false)).collect();
        Scatter { data: tensor.data_mut().as_mut_ptr(), shape, strides, tile, taken, lifetime: PhantomData }
    }

    /// The rows `index * tile..` of one head.
    ///
    /// # Panics
    /// If there is no such tile or it has been taken before.
    pub(crate) fn take(&self, batch: usize, head: usize, index: usize) -> Rows<'_, T> {
        let [batches, seqlen, heads, dims] = self.shape;
        let tiles = seqlen.div_ceil(self.tile);
        assert!(batch < batches && head < heads && index < tiles, "no tile {index} of {batch}, {head}");
        let flag = &self.taken[(batch * heads + head) * tiles + index];
        assert!(!flag.swap(true, Ordering::Relaxed), "tile {index} of {batch}, {head} is taken");
        let seq = index * self.tile..seqlen.min((index + 1) * self.tile);
        Rows { data: self.data, batch, head, seq, dims, strides: self.strides, lifetime: PhantomData }
    }
}

impl<T: Copy> Rows<'_, T> {
    /// Writes the row at position `seq` of the sequence, one value per element of the head dim.
    ///
    /// # Panics
    /// If the row is not in the tile.
    pub(crate) fn write(&mut self, seq: usize, values: impl Iterator<Item = T>) {
        assert!(self.seq.contains(&seq), "row {seq} is not in {:?}", self.seq);
        let start = self.strides.offset(self.batch, seq, self.head, 0) as isize;
        let step = self.strides.dim as isize;
        if step == 1 {
            // SAFETY: the row is inside the shape, which `TensorMut` checked against its storage when it was
            // made, its elements are consecutive, and only this value may write them.
            let row = unsafe { std::slice::from_raw_parts_mut(self.data.offset(start), self.dims) };
            for (to, value) in row.iter_mut().zip(values) {
                *to = value;
            }
        } else {
            for (dim, value) in values.take(self.dims).enumerate() {
                // SAFETY: the position is inside the shape (see above), and only this value may write it.
                unsafe { self.data.offset(start + dim as isize * step).write(value) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use fa_core::TensorLayout;

    use super::*;

    #[test]
    fn a_tile_is_handed_out_once_and_writes_only_its_rows() {
        let mut data = [0u8; 12];
        let mut tensor = TensorMut::packed("t", &mut data, [1, 3, 2, 2], TensorLayout::Bshd).unwrap();
        let scatter = Scatter::new(&mut tensor, 2);
        let mut rows = scatter.take(0, 1, 0);
        rows.write(1, [7, 8].into_iter());
        let refused = |f: &mut dyn FnMut()| {
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err());
        };
        refused(&mut || rows.write(2, [9, 9].into_iter()));
        refused(&mut || {
            scatter.take(0, 1, 0);
        });
        refused(&mut || {
            scatter.take(0, 0, 2);
        });
        scatter.take(0, 1, 1).write(2, [5, 6].into_iter());
        assert_eq!(data, [0, 0, 0, 0, 0, 0, 7, 8, 0, 0, 5, 6]);
    }
}
