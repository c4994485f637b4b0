//! Writing dQ, from transposed tiles and from the parts of a head's keys.

use std::sync::OnceLock;

use super::buffer::Buffer;
use super::cut::Cut;
use super::pack::row_stride;
use super::schedule;
use crate::element::Element;
use crate::simd::Kernels;
use crate::simd::scatter::Scatter;

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
