//! bf16 tensors in the forms that the 16-bit products read: rows, pairs along the head dim, pairs along the
//! sequence.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::buffer::Buffer;
use super::work::{Forward, TILE_N, Unit};
use crate::batch::Batch;
use crate::codes::Values;
use crate::simd::Kernels;
use crate::simd::bf16::GRAIN;
use crate::simd::cast::{halves, halves_mut};
use crate::view::TensorRef;

/// Rounds up to what the products take.
pub(super) fn grain(len: usize) -> usize {
    len.next_multiple_of(GRAIN)
}

/// Row `(batch, seq, head)` as bits; `to` has one value per element of the head dim.
fn read_row(tensor: &TensorRef<'_, bf16>, [batch, seq, head]: [usize; 3], to: &mut [u16]) {
    let strides = tensor.strides();
    if strides.dim == 1 {
        let start = strides.offset(batch, seq, head, 0) as usize;
        to.copy_from_slice(tensor.data()[start..start + to.len()].reinterpret_cast());
    } else {
        for (dim, to) in to.iter_mut().enumerate() {
            *to = tensor.at(batch, seq, head, dim).to_bits();
        }
    }
}

/// A row as words, filled up with zeros.
fn read_padded(tensor: &TensorRef<'_, bf16>, at: [usize; 3], to: &mut [u32]) {
    let (row, padding) = halves_mut(to).split_at_mut(tensor.shape()[3]);
    read_row(tensor, at, row);
    padding.fill(0);
}

/// Whether a row holds neither infinities nor NaN: no exponent of all ones.
pub(super) fn is_finite_row(tensor: &TensorRef<'_, bf16>, [batch, seq, head]: [usize; 3]) -> bool {
    let strides = tensor.strides();
    if strides.dim == 1 {
        let start = strides.offset(batch, seq, head, 0) as usize;
        let row: &[u16] = tensor.data()[start..start + tensor.shape()[3]].reinterpret_cast();
        row.iter().fold(0, |max, bits| max.max(bits & 0x7fff)) < 0x7f80
    } else {
        (0..tensor.shape()[3]).all(|dim| tensor.at(batch, seq, head, dim).is_finite())
    }
}

/// Reads `rows` rows of one head from `first` on as words, each padded with zeros to `words` words; rows up
/// to `to.len() / words` become zeros.
pub(super) fn read_rows(
    tensor: &TensorRef<'_, bf16>,
    [batch, first, head]: [usize; 3],
    rows: usize,
    to: &mut [u32],
    words: usize,
) {
    let (full, rest) = to.split_at_mut(rows * words);
    for (i, row) in full.chunks_mut(words).enumerate() {
        read_padded(tensor, [batch, first + i, head], row);
    }
    rest.fill(0);
}

/// Rows of words become pairs of rows: word `(r, c)` of `to` holds element `c` of rows `2 r` and `2 r + 1`.
pub(super) fn pair_rows(rows: &[u32], words: usize, to: &mut [u32]) {
    for (two, to) in rows.chunks(2 * words).zip(to.chunks_mut(2 * words)) {
        let (low, high) = two.split_at(words);
        for ((to, &low), &high) in to.iter_mut().zip(halves(low)).zip(halves(high)) {
            *to = u32::from(low) | u32::from(high) << 16;
        }
    }
}

/// K and V of a call as 16-bit products read them, in tiles of [`TILE_N`] keys. A tile's keys are filled up
/// with zeros to a multiple of [`GRAIN`], its capacity.
pub(super) struct Packed<'a> {
    batch: &'a Batch<'a>,
    k: TensorRef<'a, bf16>,
    v: TensorRef<'a, bf16>,
    /// Words of a row of K, of a row of V.
    words_k: usize,
    words_v: usize,
    /// What several items share: K, rows of `words_k`, and Vt, `2 * words_v` rows of a tile's keys.
    data_k: Buffer<u32>,
    data_vt: Buffer<u32>,
    /// Where each unit begins; `None` where items pack what they need.
    starts: Vec<Option<Start>>,
    /// Of each tile that is packed: whether V holds infinities or NaN. Which path computes a unit follows
    /// from the tiles that its queries see, and not from all: it is the same where items pack what they need.
    wild: Vec<AtomicBool>,
}

/// Where a unit begins: in K, in Vt, and in the tiles of all units.
#[derive(Clone, Copy)]
struct Start {
    k: usize,
    vt: usize,
    tile: usize,
}

/// One tile, packed.
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    /// K `[capacity][2 * words_k]`.
    pub k: &'a [u16],
    /// Vt `[2 * words_v][capacity]`.
    pub vt: &'a [u16],
    /// Keys that there is room for, a multiple of [`GRAIN`].
    pub capacity: usize,
    /// Whether V holds infinities or NaN.
    pub wild: bool,
}

/// Room for a tile.
pub(super) struct TileBuffer {
    k: Buffer<u32>,
    vt: Buffer<u32>,
    rows: Buffer<u32>,
    pairs: Buffer<u32>,
}

impl<'a> Packed<'a> {
    /// Packs the tiles of all `units` that are `shared`, with all threads.
    pub(super) fn new(call: &Forward<'a, bf16>, units: &[Unit], shared: &[bool]) -> Packed<'a> {
        let Forward { batch, threads, kernels, .. } = *call;
        let (Values::Same(k), Values::Same(v)) = (call.k, call.v) else {
            unreachable!("codes are decoded in f32")
        };
        let (words_k, words_v) = (grain(k.shape()[3]) / 2, grain(v.shape()[3]) / 2);
        let (mut len_k, mut len_vt, mut pieces) = (0, 0, Vec::new());
        let starts = units.iter().zip(shared).enumerate().map(|(index, (unit, &shared))| {
            let keys = batch.sequences[unit.sequence].k.len;
            shared.then(|| {
                let start = Start { k: len_k, vt: len_vt, tile: pieces.len() };
                pieces.extend((0..keys.div_ceil(TILE_N)).map(|tile| (index, tile)));
                (len_k, len_vt) = (len_k + grain(keys) * words_k, len_vt + grain(keys) * words_v);
                start
            })
        });
        let starts: Vec<_> = starts.collect();
        let (mut data_k, mut data_vt) = (Buffer::uncleared(len_k), Buffer::uncleared(len_vt));
        let packed = Packed {
            batch,
            k,
            v,
            words_k,
            words_v,
            data_k: Buffer::new(0),
            data_vt: Buffer::new(0),
            starts,
            wild: pieces.iter().map(|_| AtomicBool::new(false)).collect(),
        };
        let (mut rest_k, mut rest_vt) = (&mut data_k[..], &mut data_vt[..]);
        let pieces: Vec<_> = pieces
            .into_iter()
            .map(|(index, tile)| {
                let capacity = packed.capacity(units[index], tile);
                let (to_k, after_k) = std::mem::take(&mut rest_k).split_at_mut(capacity * words_k);
                let (to_vt, after_vt) = std::mem::take(&mut rest_vt).split_at_mut(capacity * words_v);
                (rest_k, rest_vt) = (after_k, after_vt);
                Mutex::new((index, tile, to_k, to_vt))
            })
            .collect();
        super::schedule::run(
            pieces.len(),
            threads,
            || packed.buffer(),
            |buffer, number| {
                let mut piece = pieces[number].lock().unwrap_or_else(PoisonError::into_inner);
                let (index, tile, to_k, to_vt) = &mut *piece;
                let rows = [&mut buffer.rows[..], &mut buffer.pairs[..]];
                if packed.pack(kernels, units[*index], *tile, to_k, to_vt, rows) {
                    packed.wild[number].store(true, Ordering::Relaxed);
                }
            },
        );
        drop(pieces);
        Packed { data_k, data_vt, ..packed }
    }

    /// Keys that there is room for in a tile.
    fn capacity(&self, unit: Unit, tile: usize) -> usize {
        grain(self.batch.sequences[unit.sequence].k.len.min((tile + 1) * TILE_N)) - tile * TILE_N
    }

    /// Room for a tile that is not shared.
    pub(super) fn buffer(&self) -> TileBuffer {
        TileBuffer {
            k: Buffer::uncleared(TILE_N * self.words_k),
            vt: Buffer::uncleared(TILE_N * self.words_v),
            rows: Buffer::uncleared(TILE_N * self.words_v),
            pairs: Buffer::uncleared(TILE_N * self.words_v),
        }
    }

    /// Packs a tile; returns whether V holds infinities or NaN.
    fn pack(
        &self,
        kernels: Kernels,
        unit: Unit,
        tile: usize,
        k: &mut [u32],
        vt: &mut [u32],
        [rows, pairs]: [&mut [u32]; 2],
    ) -> bool {
        let (words_v, capacity) = (self.words_v, self.capacity(unit, tile));
        let keys = tile * TILE_N..self.batch.sequences[unit.sequence].k.len.min((tile + 1) * TILE_N);
        self.read(&self.k, unit, &keys, k, self.words_k);
        let (rows, pairs) = (&mut rows[..capacity * words_v], &mut pairs[..capacity * words_v]);
        self.read(&self.v, unit, &keys, rows, words_v);
        pair_rows(rows, words_v, pairs);
        kernels.transpose_words([capacity / 2, 2 * words_v], pairs, 2 * words_v, vt, capacity / 2);
        // An exponent of all ones.
        halves(rows).iter().fold(0, |max, bits| max.max(bits & 0x7fff)) >= 0x7f80
    }

    /// Rows of K or V as words, zeros behind the last one.
    fn read(
        &self,
        tensor: &TensorRef<'_, bf16>,
        unit: Unit,
        keys: &Range<usize>,
        to: &mut [u32],
        words: usize,
    ) {
        let (full, rest) = to.split_at_mut(keys.len() * words);
        for (key, row) in keys.clone().zip(full.chunks_mut(words)) {
            let (outer, inner) = self.batch.key(unit.sequence, key);
            read_padded(tensor, [outer, inner, unit.kv_head], row);
        }
        rest.fill(0);
    }

    /// A tile of unit number `index`: the shared one, or packed into `buffer`.
    pub(super) fn tile<'s>(
        &'s self,
        kernels: Kernels,
        index: usize,
        unit: Unit,
        tile: usize,
        buffer: &'s mut TileBuffer,
    ) -> Tile<'s> {
        let capacity = self.capacity(unit, tile);
        let (len_k, len_vt) = (capacity * self.words_k, capacity * self.words_v);
        if let Some(start) = self.starts[index] {
            let k = start.k + tile * TILE_N * self.words_k;
            let vt = start.vt + tile * TILE_N * self.words_v;
            return Tile {
                k: halves(&self.data_k[k..k + len_k]),
                vt: halves(&self.data_vt[vt..vt + len_vt]),
                capacity,
                wild: self.wild[start.tile + tile].load(Ordering::Relaxed),
            };
        }
        let TileBuffer { k, vt, rows, pairs } = buffer;
        let (k, vt) = (&mut k[..len_k], &mut vt[..len_vt]);
        let wild = self.pack(kernels, unit, tile, k, vt, [rows, pairs]);
        Tile { k: halves(k), vt: halves(vt), capacity, wild }
    }
}
