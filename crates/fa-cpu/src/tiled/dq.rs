//! Writing gradients: dQ from transposed tiles and from the parts of a head's keys, dK and dV by items of
//! keys.

use std::ops::Range;
use std::sync::OnceLock;

use super::buffer::Buffer;
use super::cut::{Cut, TILE_N};
use super::inputs::Backward;
use super::pack::row_stride;
use super::schedule;
use super::work::Unit;
use crate::element::Element;
use crate::simd::Kernels;
use crate::simd::scatter::Scatter;
use crate::view::TensorMut;

/// The writers of a backward's gradients.
pub(super) struct Writers<'a, T> {
    pub dq: DqWriter<'a, T>,
    /// In pieces of an item's keys.
    dk: Scatter<'a, T>,
    dv: Scatter<'a, T>,
}

impl<'a, T: Element> Writers<'a, T> {
    /// For `call` with the items of `cuts`: dQ in tiles of `tile_m` queries, whose dQt has `len` values.
    pub(super) fn new(
        call: &Backward<'_, T>,
        cuts: &[Cut],
        [dq, dk, dv]: [&'a mut TensorMut<'_, T>; 3],
        [tile_m, len]: [usize; 2],
    ) -> Self {
        let Backward { kernels, problem, batch, .. } = *call;
        let sequences = &batch.sequences;
        let to = Scatter::new(dq, sequences.iter().map(|sequence| (sequence.q, tile_m)));
        let (scale, head_dim) = (problem.scale() as f32, problem.head_dim);
        let mut tiles = vec![TILE_N; sequences.len()];
        cuts.iter().for_each(|cut| tiles[cut.unit.sequence] = cut.keys);
        let of_keys = || sequences.iter().zip(&tiles).map(|(sequence, &tile)| (sequence.k, tile));
        let (dk, dv) = (Scatter::new(dk, of_keys()), Scatter::new(dv, of_keys()));
        Writers { dq: DqWriter { kernels, scale, head_dim, tile_m, len, to }, dk, dv }
    }

    /// Writes the sums of dK and dV over all queries for `keys`, item `part` of `unit`, each with its row
    /// stride.
    pub(super) fn write_keys(
        &self,
        unit: Unit,
        part: usize,
        keys: Range<usize>,
        [(dk, ldk), (dv, ldv)]: [(&[f32], usize); 2],
    ) {
        if keys.is_empty() {
            return;
        }
        let DqWriter { kernels, scale, .. } = self.dq;
        let mut to_dk = self.dk.take(unit.sequence, unit.kv_head, part);
        let mut to_dv = self.dv.take(unit.sequence, unit.kv_head, part);
        for (i, key) in keys.enumerate() {
            to_dk.write(kernels, key, &dk[i * ldk..], scale);
            to_dv.write(kernels, key, &dv[i * ldv..], 1.0);
        }
    }
}

/// Writes dQ.
pub(super) struct DqWriter<'a, T> {
    pub kernels: Kernels,
    /// The softmax scale.
    pub scale: f32,
    pub head_dim: usize,
    /// Queries of a tile, and values of its dQt.
    pub tile_m: usize,
    pub len: usize,
    pub to: Scatter<'a, T>,
}

impl<T: Element> DqWriter<'_, T> {
    /// Writes one tile of a head from dQt `[head_dim][tile_m]`, transposed into `rows`, a row per query.
    pub(super) fn write(&self, cut: &Cut, [head, tile]: [usize; 2], dqt: &[f32], rows: &mut [f32]) {
        let (tile_m, ld) = (self.tile_m, row_stride(self.head_dim));
        let queries = tile * tile_m..cut.band.q.min((tile + 1) * tile_m);
        self.kernels.transpose([self.head_dim, queries.len()], dqt, tile_m, rows, ld);
        let mut to = self.to.take(cut.unit.sequence, head, tile);
        for (row, values) in queries.zip(rows.chunks(ld)) {
            to.write(self.kernels, row, values, self.scale);
        }
    }

    /// Adds up the parts of every head's dQ, in order, and writes it. `partial` holds `[part][member]` from
    /// each cut's first on.
    pub(super) fn add_partial(
        &self,
        threads: Option<usize>,
        group: usize,
        cuts: &[Cut],
        partial: &[OnceLock<Buffer>],
    ) {
        let mut items = vec![];
        for cut in cuts.iter().filter(|cut| cut.parts > 1) {
            items.extend((0..group).flat_map(|member| (0..cut.m_tiles).map(move |tile| (cut, member, tile))));
        }
        schedule::run(
            items.len(),
            threads,
            || [Buffer::new(self.len), Buffer::new(self.tile_m * row_stride(self.head_dim))],
            |[sum, rows], item| {
                let (cut, member, tile) = items[item];
                sum.fill(0.0);
                for part in 0..cut.parts {
                    if let Some(part) = partial[cut.partial + part * group + member].get() {
                        for (sum, value) in sum.iter_mut().zip(&part[tile * self.len..]) {
                            *sum += value;
                        }
                    }
                }
                let head = cut.unit.kv_head * group + member;
                self.write(cut, [head, tile], sum, rows);
            },
        );
    }
}
