//! The rows of an append: how they are written, by all threads, and rotated, by the CPU's instructions.

use std::cmp::Reverse;
use std::sync::{Mutex, PoisonError};

use fa_core::{Rotary, RotaryPairs};

use crate::element::Element;
use crate::simd::{Isa, Kernels};
use crate::tiled::schedule;
use crate::view::{TensorMut, TensorRef};

/// A row of all heads: entry and row of the tensors that it comes from and goes to, its position and its
/// sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub from: (usize, usize),
    pub to: (usize, usize),
    pub position: usize,
    pub sequence: usize,
}

/// Elements that a thread takes at a time: fewer take less time than waking the thread.
const ELEMENTS: usize = 16 << 10;

/// Calls `fill(row, head, elements, scratch)` for every head of all `rows`, with the current elements of
/// `to`. Of several rows with the same destination the last one is written.
pub(super) fn write<T: Copy + Default + Send + Sync>(
    to: &mut TensorMut<'_, T>,
    rows: &[Row],
    fill: impl Fn(&Row, usize, &mut [T], &mut Scratch) + Sync,
) {
    let ([_, _, heads, dim], strides) = (to.shape(), to.strides());
    if heads == 0 || dim == 0 {
        return;
    }
    let data = to.data_mut();
    let offset = |row: &Row, head: usize| strides.offset(row.to.0, row.to.1, head, 0) as usize;
    if strides.dim != 1 && dim > 1 {
        let (mut own, mut scratch) = (vec![T::default(); dim], Scratch::default());
        for (row, head) in rows.iter().flat_map(|row| (0..heads).map(move |head| (row, head))) {
            let at = |i: usize| (offset(row, head) as i64 + i as i64 * strides.dim) as usize;
            own.iter_mut().enumerate().for_each(|(i, value)| *value = data[at(i)]);
            fill(row, head, &mut own, &mut scratch);
            own.iter().enumerate().for_each(|(i, &value)| data[at(i)] = value);
        }
        return;
    }
    // Pieces that one thread writes: all heads of a row where they are contiguous, else one.
    let together = if heads == 1 || strides.head == dim as i64 { heads } else { 1 };
    let pieces = rows.iter().enumerate().flat_map(|(i, row)| {
        (0..heads / together).map(move |piece| (offset(row, piece * together), i, piece * together))
    });
    let mut pieces: Vec<_> = pieces.collect();
    if !pieces.is_sorted_by(|a, b| a.0 < b.0) {
        pieces.sort_by_key(|&(at, i, _)| (at, Reverse(i)));
        pieces.dedup_by_key(|&mut (at, ..)| at);
    }
    let (mut rest, mut begin, len) = (data, 0, together * dim);
    let mut places = Vec::with_capacity(pieces.len());
    for (at, i, first) in pieces {
        let (own, after) = std::mem::take(&mut rest)[at - begin..].split_at_mut(len);
        places.push((&rows[i], first, own));
        (rest, begin) = (after, at + len);
    }
    let shares: Vec<_> = places.chunks_mut(ELEMENTS.div_ceil(len)).map(Mutex::new).collect();
    schedule::run(shares.len(), None, Scratch::default, |scratch, share| {
        let mut places = shares[share].lock().unwrap_or_else(PoisonError::into_inner);
        for (row, first, own) in places.iter_mut() {
            for (head, own) in own.chunks_exact_mut(dim).enumerate() {
                fill(row, *first + head, own, scratch);
            }
        }
    });
}

/// Copies a head's row.
pub(super) fn copy<T: Copy>(
    from: &TensorRef<'_, T>,
    (entry, row): (usize, usize),
    head: usize,
    to: &mut [T],
) {
    if from.strides().dim == 1 {
        let at = from.strides().offset(entry, row, head, 0) as usize;
        to.copy_from_slice(&from.data()[at..at + to.len()]);
    } else {
        to.iter_mut().enumerate().for_each(|(dim, value)| *value = from.at(entry, row, head, dim));
    }
}

/// Scratch memory of a thread: a row, and the cosines and sines of a position.
#[derive(Default)]
pub(super) struct Scratch {
    values: Vec<f32>,
    angles: [Vec<f32>; 2],
    position: Option<usize>,
}

/// Cosines or sines, `[positions, dim / 2]`, in the type that [`fa_core::Rotary::table`] names.
#[derive(Clone, Copy, Debug)]
pub enum Table<'a, T> {
    /// In f32.
    F32(&'a [f32]),
    /// In the type of the tensors.
    Same(&'a [T]),
}

impl<T: Element> Table<'_, T> {
    pub(super) fn len(&self) -> usize {
        match self {
            Table::F32(values) => values.len(),
            Table::Same(values) => values.len(),
        }
    }
}

/// Rotary embedding by tables.
pub(super) struct Turns<'a, T> {
    rotary: Rotary,
    tables: &'a [Table<'a, T>; 2],
    kernels: Kernels,
}

impl<'a, T: Element> Turns<'a, T> {
    pub(super) fn new(rotary: Rotary, tables: &'a [Table<'a, T>; 2]) -> Turns<'a, T> {
        let kernels = Kernels::for_isa(Isa::detect()).expect("what was detected is there");
        Turns { rotary, tables, kernels }
    }

    /// Rotates the first elements of a row with a GPU's roundings: products and sums in f32, then the result.
    pub(super) fn apply(&self, row: &mut [T], position: usize, scratch: &mut Scratch) {
        let (dim, half) = (self.rotary.dim, self.rotary.dim / 2);
        let Scratch { values, angles, position: known } = scratch;
        if *known != Some(position) {
            for (own, table) in angles.iter_mut().zip(self.tables) {
                own.resize(half, 0.0);
                let of = position * half..(position + 1) * half;
                match table {
                    Table::F32(table) => own.copy_from_slice(&table[of]),
                    Table::Same(table) => self.kernels.widen(&table[of], own),
                }
            }
            *known = Some(position);
        }
        values.resize(dim, 0.0);
        self.kernels.widen(&row[..dim], values);
        let angles = angles[0].iter().zip(&angles[1]);
        let turn = |a: &mut f32, b: &mut f32, cos: f32, sin: f32| {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        };
        match self.rotary.pairs {
            RotaryPairs::Halves => {
                let (low, high) = values.split_at_mut(half);
                low.iter_mut().zip(high).zip(angles).for_each(|((a, b), (&cos, &sin))| turn(a, b, cos, sin));
            }
            RotaryPairs::Neighbours => {
                for (pair, (&cos, &sin)) in values.chunks_exact_mut(2).zip(angles) {
                    let [a, b] = pair else { continue };
                    turn(a, b, cos, sin);
                }
            }
        }
        self.kernels.narrow(values, 1.0, &mut row[..dim]);
    }
}
