//! From tensors of any element type and strides to f32 tiles.

use std::sync::atomic::{AtomicBool, Ordering};

use super::buffer::Buffer;
use super::schedule;
use crate::element::Element;
use crate::simd::cast;
use crate::view::TensorRef;

/// The rows of every head as f32.
pub(super) enum HeadRows<'a> {
    /// The tensor's own, where it is f32 with the head dim contiguous: products read them as they lie.
    InPlace(TensorRef<'a, f32>),
    /// Converted.
    Packed {
        /// Each head's rows consecutively, at stride `ld`.
        data: Buffer,
        /// Heads.
        heads: usize,
        /// Values of one head.
        head_len: usize,
        /// Distance between rows.
        ld: usize,
    },
}

/// A row stride of at least `len` values that is an odd number of cache lines: a column of a tile then
/// spreads over all sets of the first-level cache.
pub(super) fn row_stride(len: usize) -> usize {
    (len.div_ceil(16) | 1) * 16
}

impl<'a> HeadRows<'a> {
    /// All of a tensor's rows, converted (where they have to be) by all threads.
    pub(super) fn new<T: Element>(tensor: &TensorRef<'a, T>, threads: Option<usize>) -> Self {
        let [batch, seqlen, heads, dims] = tensor.shape();
        let strides = tensor.strides();
        if let Some(tensor) = cast::tensor(tensor)
            && strides.dim == 1
            && strides.seq >= dims as i64
        {
            return HeadRows::InPlace(tensor);
        }
        let ld = row_stride(dims);
        let mut data = Buffer::new(batch * heads * seqlen * ld);
        let head_len = seqlen * ld;
        if head_len > 0 {
            // A few hundred kilobytes a piece: small enough to share out, large enough not to matter.
            const ROWS: usize = 512;
            let pieces: Vec<_> = data
                .chunks_mut(head_len)
                .enumerate()
                .flat_map(|(head, rows)| {
                    rows.chunks_mut(ROWS * ld).enumerate().map(move |(i, rows)| (head, i * ROWS, rows))
                })
                .map(std::sync::Mutex::new)
                .collect();
            schedule::run(
                pieces.len(),
                threads,
                || (),
                |(), piece| {
                    let mut piece = pieces[piece].lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    let (head, first, rows) = &mut *piece;
                    for (i, row) in rows.chunks_mut(ld).enumerate() {
                        read_row(tensor, [*head / heads, *first + i, *head % heads], &mut row[..dims]);
                    }
                },
            );
        }
        HeadRows::Packed { data, heads, head_len, ld }
    }

    /// The rows of one head, from its first on, and the distance between them. Empty when the sequence is.
    pub(super) fn head(&self, batch: usize, head: usize) -> (&[f32], usize) {
        match self {
            HeadRows::InPlace(tensor) => {
                let strides = tensor.strides();
                let start = strides.offset(batch, 0, head, 0) as usize;
                (tensor.data().get(start..).unwrap_or(&[]), strides.seq as usize)
            }
            HeadRows::Packed { data, heads, head_len, ld } => {
                let start = (batch * heads + head) * head_len;
                (&data[start..start + head_len], *ld)
            }
        }
    }
}

/// Whether all rows (`[batch, seqlen, heads, dims]`) hold neither infinities nor NaN.
pub(super) fn all_finite(rows: &HeadRows<'_>, shape: [usize; 4], threads: Option<usize>) -> bool {
    let [batch, seqlen, heads, dims] = shape;
    let finite = AtomicBool::new(true);
    schedule::run(
        batch * heads,
        threads,
        || (),
        |(), item| {
            let (values, ld) = rows.head(item / heads, item % heads);
            if !values.chunks(ld).take(seqlen).all(|row| is_finite(&row[..dims])) {
                finite.store(false, Ordering::Relaxed);
            }
        },
    );
    finite.into_inner()
}

/// Whether all values are neither infinities nor NaN.
pub(super) fn is_finite(values: &[f32]) -> bool {
    // No early exit: the largest of all bits (without the sign) vectorises.
    let largest = values.iter().fold(0, |max, value| max.max(value.to_bits() << 1));
    largest < f32::INFINITY.to_bits() << 1
}

/// Row `(batch, seq, head)` as f32.
pub(super) fn read_row<T: Element>(
    tensor: &TensorRef<'_, T>,
    [batch, seq, head]: [usize; 3],
    to: &mut [f32],
) {
    let strides = tensor.strides();
    if strides.dim == 1 {
        let start = strides.offset(batch, seq, head, 0) as usize;
        let row = &tensor.data()[start..start + to.len()];
        for (to, &value) in to.iter_mut().zip(row) {
            *to = value.to_f32();
        }
    } else {
        for (dim, to) in to.iter_mut().enumerate() {
            *to = tensor.at(batch, seq, head, dim).to_f32();
        }
    }
}

/// Rows `first..first + rows` of one head, multiplied by `scale`, at stride `ld`.
pub(super) fn read_rows<T: Element>(
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
        read_row(tensor, [batch, first + i, head], row);
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
