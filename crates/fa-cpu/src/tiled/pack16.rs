//! bf16 tensors in the forms that the 16-bit products read: rows, pairs along the head dim, pairs along the
//! sequence.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::buffer::Buffer;
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

/// Reads `rows` rows of one head from `first` on as words, each padded with zeros to `words` words; rows up
/// to `to.len() / words` become zeros.
pub(super) fn read_rows(
    tensor: &TensorRef<'_, bf16>,
    [batch, first, head]: [usize; 3],
    rows: usize,
    to: &mut [u32],
    words: usize,
) {
    let dims = tensor.shape()[3];
    let (full, rest) = to.split_at_mut(rows * words);
    for (i, row) in full.chunks_mut(words).enumerate() {
        let row = halves_mut(row);
        let (row, padding) = row.split_at_mut(dims);
        read_row(tensor, [batch, first + i, head], row);
        padding.fill(0);
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

/// K and V of every head, in tiles of `tile_n` keys (the last one filled up with zeros).
pub(super) struct PackedKv {
    /// K, rows of `head_dim` padded.
    k: Buffer<u32>,
    /// Vt, `head_dim_v` padded rows of `tile_n` keys for each tile.
    vt: Buffer<u32>,
    /// Words of one tile.
    k_tile: usize,
    vt_tile: usize,
    heads: usize,
    tiles: usize,
    /// Whether V holds neither infinities nor NaN.
    pub(super) finite_v: bool,
}

impl PackedKv {
    /// Converts with all threads.
    pub(super) fn new(
        kernels: Kernels,
        threads: Option<usize>,
        k: &TensorRef<'_, bf16>,
        v: &TensorRef<'_, bf16>,
        tile_n: usize,
    ) -> PackedKv {
        let [batch, seqlen, heads, _] = k.shape();
        let (words_k, words_v) = (grain(k.shape()[3]) / 2, grain(v.shape()[3]) / 2);
        let tiles = seqlen.div_ceil(tile_n);
        let (k_tile, vt_tile) = (tile_n * words_k, words_v * tile_n);
        let count = batch * heads * tiles;
        let mut packed = PackedKv {
            k: Buffer::new(count * k_tile),
            vt: Buffer::new(count * vt_tile),
            k_tile,
            vt_tile,
            heads,
            tiles,
            finite_v: true,
        };
        if count == 0 {
            return packed;
        }
        let pieces: Vec<_> = packed
            .k
            .chunks_mut(k_tile)
            .zip(packed.vt.chunks_mut(vt_tile))
            .map(std::sync::Mutex::new)
            .collect();
        let finite_v = AtomicBool::new(true);
        super::schedule::run(
            count,
            threads,
            || [Buffer::<u32>::new(vt_tile), Buffer::<u32>::new(vt_tile)],
            |[rows, pairs], piece| {
                let (index, tile) = (piece / tiles, piece % tiles);
                let at = [index / heads, tile * tile_n, index % heads];
                let keys = tile_n.min(seqlen - tile * tile_n);
                let mut piece = pieces[piece].lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                read_rows(k, at, keys, piece.0, words_k);
                read_rows(v, at, keys, rows, words_v);
                // An exponent of all ones.
                if halves(rows).iter().fold(0, |max, bits| max.max(bits & 0x7fff)) >= 0x7f80 {
                    finite_v.store(false, Ordering::Relaxed);
                }
                pair_rows(rows, words_v, pairs);
                kernels.transpose_words([tile_n / 2, 2 * words_v], pairs, 2 * words_v, piece.1, tile_n / 2);
            },
        );
        drop(pieces);
        packed.finite_v = finite_v.into_inner();
        packed
    }

    fn index(&self, batch: usize, head: usize, tile: usize) -> usize {
        (batch * self.heads + head) * self.tiles + tile
    }

    /// Rows `keys` (counted within the tile) of K.
    pub(super) fn k(
        &self,
        batch: usize,
        head: usize,
        tile: usize,
        keys: &Range<usize>,
        words: usize,
    ) -> &[u16] {
        let start = self.index(batch, head, tile) * self.k_tile;
        halves(&self.k[start + keys.start * words..start + self.k_tile])
    }

    /// Vt of a tile from key `first` (counted within the tile, even) on.
    pub(super) fn vt(&self, batch: usize, head: usize, tile: usize, first: usize) -> &[u16] {
        let start = self.index(batch, head, tile) * self.vt_tile;
        halves(&self.vt[start + first / 2..start + self.vt_tile])
    }
}
